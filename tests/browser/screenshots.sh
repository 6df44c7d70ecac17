#!/usr/bin/env bash
# Serves the demo models and makes the pictures in docs/images/ again; after `make test-browser`, which installs what it needs.
set -eu

cd "$(dirname "$0")/../.."
python="${PYTHON:-.venv/bin/python}"
logs=$(mktemp -d)
servers=()
trap 'kill "${servers[@]}"; rm -rf "$logs"' EXIT

# Few pages, so that each can be seen.
serve() {
    "$python" -m octavo serve --demo "$1" --port "$2" --num-gpu-blocks-override 600 >"$logs/$1" 2>&1 &
    servers+=($!)
    for _ in $(seq 240); do
        grep -q "Serving" "$logs/$1" && return
        kill -0 $! || { cat "$logs/$1"; exit 1; }
        sleep 0.5
    done
    cat "$logs/$1"
    exit 1
}

serve chat 8765
serve seq2seq 8766
node tests/browser/screenshots.mjs docs/images http://127.0.0.1:8765 http://127.0.0.1:8766
# Where it is installed it makes them a third as large.
if command -v pngquant >/dev/null; then
    pngquant --force --ext .png --quality 80-98 docs/images/playground-*.png
fi
