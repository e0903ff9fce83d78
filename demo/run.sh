#!/usr/bin/env bash
# The whole job on this machine, with the commands you would type for a real container.
set -euo pipefail
cd "$(dirname "$0")/.."
export DFO_INVENTORY=inventory/local.yaml

run() {
    printf '\n\033[1m$ %s\033[0m\n' "$*"
    "$@"
}

started=$(date +%s)
run dfo deploy
run dfo env-snapshot --to demo-report/environment.json
run dfo launch --warmup-first
run dfo logs -f --exit-like-run
run dfo report --to demo-report --snapshot demo-report/environment.json --clock-from "$started"
run dfo status
