#!/bin/sh
# curl: a chat, a stream, beam search, a vector, and how a mistake is answered.
#
#     octavo serve
#     sh examples/curl.sh
#
# Another server's URL can be given as the argument.
set -eu

url=${1:-http://127.0.0.1:8000}

ask() { # path, body, flags of curl
    path=$1 body=$2
    shift 2
    curl --silent --show-error "$@" "$url$path" -H 'Content-Type: application/json' -d "$body"
    echo
}

echo "--- chat"
ask /v1/chat/completions '{
    "messages": [{"role": "user", "content": "What is a paged cache?"}],
    "max_completion_tokens": 32, "temperature": 0
}'

echo "--- stream"
ask /v1/completions '{"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, "stream": true}' --no-buffer

echo "--- beams"
ask /v1/completions '{"prompt": "Once upon a time", "max_tokens": 16, "num_beams": 4, "n": 2}'

echo "--- vector"
ask /v1/embeddings '{"input": "Once upon a time"}' | cut -c 1-320

echo "--- mistake"
ask /v1/completions '{"prompt": "Once upon a time", "temperature": -1}'
