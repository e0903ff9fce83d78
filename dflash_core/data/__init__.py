"""Chats: reading them from JSONL files, encoding them with a loss mask, packing them into rows, generating them."""
