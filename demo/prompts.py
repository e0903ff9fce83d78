"""Writes the demo's prompts: small Python tasks, composed from the table below.

    python demo/prompts.py          # rewrites demo/data/prompts-{train,live,heldout}.jsonl

Held-out prompts use operations that no training prompt uses, in any wording, so the two sets are disjoint by
task and not only by text. The answers in demo/data/chats.jsonl are the target's own:

    python -m dflash_core generate --config demo/generate.yaml --run-dir demo/data
"""

from __future__ import annotations

import json
from pathlib import Path

DATA = Path(__file__).parent / "data"

WORDINGS = (
    "Write a Python function that {task}.",
    "Write a short Python function that {task}. Include a docstring.",
    "Please give me a Python function that {task}.",
)

#: Subject → operations. The last three operations of each subject are held out.
TASKS: dict[str, tuple[str, ...]] = {
    "a list of integers": (
        "returns the sum of", "returns the largest element of", "returns the smallest element of",
        "returns the average of", "sorts", "reverses", "counts the even numbers in",
        "removes the duplicates from", "returns the product of", "returns the index of the maximum of",
        "returns the second largest element of", "returns the sum of the squares of",
        "returns the median of", "counts the negative numbers in", "doubles every element of",
    ),
    "a list of strings": (
        "joins", "sorts by length", "returns the longest element of", "returns the shortest element of",
        "converts to upper case", "counts the empty strings in", "removes the duplicates from",
        "returns the first letters of", "reverses each element of", "returns the total length of",
        "filters the palindromes from", "groups by first letter",
        "counts the vowels in", "sorts in alphabetical order", "returns the elements that start with 'a' from",
    ),
    "a string": (
        "reverses", "counts the vowels in", "counts the words in", "checks for a palindrome in",
        "removes the spaces from", "capitalizes each word of", "returns the most common letter of",
        "counts the digits in", "replaces every vowel with a star in", "returns the unique characters of",
        "swaps the case of", "returns every second character of",
        "removes the punctuation from", "counts the upper case letters in", "repeats twice",
    ),
    "a dictionary": (
        "returns the keys of", "returns the values of", "inverts", "sorts by value",
        "returns the key with the largest value of", "merges another one into",
        "removes the empty values from", "counts the items of", "returns the sum of the values of",
        "filters the values above ten from", "renames a key of", "converts to a list of pairs",
        "sorts by key", "returns the smallest value of", "checks whether a key exists in",
    ),
    "a number": (
        "checks the parity of", "computes the factorial of", "checks whether it is prime for",
        "returns the digits of", "sums the digits of", "returns the divisors of", "reverses the digits of",
        "computes the square root of", "converts to binary", "converts to a Roman numeral",
        "checks whether it is a perfect square for", "counts the digits of",
        "returns the absolute value of", "computes the cube of", "converts to hexadecimal",
    ),
    "a matrix": (
        "transposes", "returns the diagonal of", "sums all elements of", "returns the largest element of",
        "flattens", "multiplies by a scalar", "returns the first row of", "checks the symmetry of",
        "counts the zeros in", "returns the column sums of", "rotates", "adds another one to",
        "returns the row sums of", "returns the smallest element of", "returns the last column of",
    ),
    "a text file": (
        "reads", "counts the lines of", "counts the words of", "returns the last line of",
        "prints each line of", "appends a line to", "copies", "searches for a word in",
        "replaces a word in", "removes the empty lines from", "returns the longest line of", "reverses the lines of",
        "counts the characters of", "returns the first line of", "sorts the lines of",
    ),
    "two numbers": (
        "adds", "subtracts", "multiplies", "divides", "returns the larger of", "returns the smaller of",
        "computes the greatest common divisor of", "computes the least common multiple of",
        "returns the remainder of", "checks the equality of", "computes the power of", "swaps",
        "computes the average of", "computes the absolute difference of", "returns the sum of the squares of",
    ),
    "a temperature": (
        "converts from Celsius to Fahrenheit", "converts from Kelvin to Celsius", "checks for frost at",
        "rounds", "prints a warning for", "classifies as cold or warm",
        "converts from Celsius to Kelvin", "formats with one decimal",
        "compares with a limit", "checks the valid range of", "validates", "logs",
        "converts from Fahrenheit to Celsius", "formats with a unit", "clamps",
    ),
    "a binary tree": (
        "computes the height of", "counts the nodes of", "counts the leaves of", "inserts a value into",
        "searches for a value in", "traverses in order", "mirrors", "returns the largest value of",
        "sums the values of", "checks the balance of", "traverses level by level", "returns the depth of a node in",
        "traverses in post-order", "returns the smallest value of", "copies",
    ),
}  # fmt: skip
HELD_OUT_OPERATIONS = 3
LIVE = 4


def compose() -> tuple[list[str], list[str]]:
    """(training prompts, held-out prompts): held-out tasks appear in one wording each."""
    train: list[str] = []
    held_out: list[str] = []
    for subject, operations in TASKS.items():
        for operation in operations[:-HELD_OUT_OPERATIONS]:
            train += [wording.format(task=f"{operation} {subject}") for wording in WORDINGS]
        for number, operation in enumerate(operations[-HELD_OUT_OPERATIONS:]):
            held_out.append(WORDINGS[number].format(task=f"{operation} {subject}"))
    return train, held_out


def write(name: str, prompts: list[str]) -> None:
    lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    (DATA / name).write_text(lines, encoding="utf-8")


def main() -> None:
    train, held_out = compose()
    assert not set(train) & set(held_out)
    # Every 90th prompt is answered live during the demo instead of shipping with an answer.
    live = train[:: len(train) // LIVE][:LIVE]
    write("prompts-live.jsonl", live)
    write("prompts-train.jsonl", [prompt for prompt in train if prompt not in set(live)])
    write("prompts-heldout.jsonl", held_out)


if __name__ == "__main__":
    main()
