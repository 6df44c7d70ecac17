#!/usr/bin/env bash
# Serves the demo model and makes the pictures in docs/images/ again; after `make test-browser`, which installs what it needs.
set -eu

cd "$(dirname "$0")/../.."
python="${PYTHON:-.venv/bin/python}"
log=$(mktemp)
"$python" -m octavo serve --port 8765 --num-gpu-blocks-override 600 >"$log" 2>&1 &
server=$!
trap 'kill $server; rm -f "$log"' EXIT
for _ in $(seq 240); do
    if grep -q "Serving" "$log"; then
        node tests/browser/screenshots.mjs http://127.0.0.1:8765 docs/images
        # Where it is installed it makes them a third as large.
        if command -v pngquant >/dev/null; then
            pngquant --force --ext .png --quality 80-98 docs/images/playground-*.png
        fi
        exit 0
    fi
    kill -0 $server || { cat "$log"; exit 1; }
    sleep 0.5
done
cat "$log"
exit 1
