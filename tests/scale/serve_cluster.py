"""A Ray cluster on this machine, with Serve, for as long as stdin is open. Each line of stdin is what
`server.replicas.application.build` takes, and is deployed; "null" deletes what is deployed. Each is answered by a line
of JSON on stdout once it is done.

    python serve_cluster.py PORT FOLDER
"""

from __future__ import annotations

import json
import os
import sys

import ray
from ray import serve

from server.replicas.application import build


def main() -> None:
    port, folder = int(sys.argv[1]), sys.argv[2]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints goes to the log
    # More cores than there are: replicas may wait for each other.
    ray.init("local", include_dashboard=False, num_cpus=8, _temp_dir=folder)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    print(json.dumps({"started": True}), file=answers, flush=True)
    for line in sys.stdin:
        arguments = json.loads(line)
        try:
            if arguments is None:
                serve.delete("default")
            else:
                serve.run(build(arguments))
            answer = {"done": True}
        except Exception as problem:
            answer = {"problem": f"{type(problem).__name__}: {problem}"}
        print(json.dumps(answer), file=answers, flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
