#!/usr/bin/env bash
# Builds the CPU image with buildah and runs it as a container runtime would, without a daemon: in namespaces of its
# own, on a read-only root, as the image's user, without capabilities. Needs Linux, root, buildah and util-linux.
#
#   deploy/test-image.sh
#
# Exit status: 0 passed, 1 failed, 77 skipped because something it needs is not there (it says what).
#
# Environment, all optional:
#   BASE_IMAGE      the base to build on, pulled if it is not here. Without it a Debian base is made with debootstrap
#                   (once; kept as localhost/octavo-base), and nothing is pulled.
#   TORCH_INDEX     the package index of torch; set but empty: pip's configured index.
#   BUILD_OPTIONS   more words for `buildah bud`. On a closed network, pip's settings and certificates are mounted:
#                   BUILD_OPTIONS="--volume /etc/pip.conf:/etc/pip.conf:ro --volume /etc/ssl/certs:/etc/ssl/certs:ro"
#   DEBIAN_SUITE    of that base (default bookworm), DEBIAN_MIRROR where debootstrap takes it from.
#   RESULT          the file that the figures go to (default benchmarks/results/image-cpu.json).
#   SIZE_LIMIT      bytes, uncompressed (default 1300000000).
#   IMAGE           the name that the image gets, and keeps (default localhost/octavo:cpu).

set -euo pipefail

IMAGE=${IMAGE:-localhost/octavo:cpu}
SIZE_LIMIT=${SIZE_LIMIT:-1300000000}
DRAIN_LIMIT=30 # seconds; OCTAVO_SHUTDOWN_TIMEOUT's default
NOT_CHECKED="a container engine's seccomp profile, cgroup limits and port publishing, because no container daemon is used"

say() { echo "test-image: $*" >&2; }
fail() { say "FAILED: $*"; exit 1; }
passed() { say "ok: $*"; }

# ---------------------------------------------------------------- inside: process 1 of the test's own namespaces
# The service is started in a further process namespace, so that it is process 1 there, as it is in a container.

run_in_container() { # WORDS...: a second process of the running container, as `docker exec` does it
    nsenter --target "$service" --mount --net --pid --root --wd -- "${as_user[@]}" "$@"
}

start_service() { # WORDS...: sets `launcher`, whose exit status is the service's, and `service`
    unshare --pid --fork --kill-child --mount-proc --root="$root" --wd="$workdir" \
        "${as_user[@]}" "${entrypoint[@]}" "$@" &
    launcher=$!
    service=
    for _ in $(seq 100); do
        service=$(cat "/proc/$launcher/task/$launcher/children")
        service=${service% }
        # Until it has become the image's user, it is not yet the service.
        if [ -n "$service" ] && grep -q "^Uid:.${user%%:*}" "/proc/$service/status"; then return; fi
        kill -0 "$launcher" 2>/dev/null || fail "the service ended at once"
        sleep 0.05
    done
    fail "the service did not start"
}

await_health() {
    for _ in $(seq 600); do
        if run_in_container "${healthcheck[@]}" 2>/dev/null; then return; fi
        kill -0 "$launcher" 2>/dev/null || fail "the service ended before it was ready"
        sleep 0.1
    done
    fail "not ready after a minute and more: $(run_in_container "${healthcheck[@]}" 2>&1)"
}

now() { date +%s.%N; }
since() { python3 -c 'import sys; print(round(float(sys.argv[2]) - float(sys.argv[1]), 2))' "$1" "$(now)"; }

stop_service() { # sets `stop_seconds`
    local begin status=0
    begin=$(now)
    kill -TERM "$service"
    wait "$launcher" || status=$?
    stop_seconds=$(since "$begin")
    [ "$status" = 0 ] || fail "SIGTERM ended the service with status $status, not 0"
    python3 -c "import sys; sys.exit(not $stop_seconds < $DRAIN_LIMIT)" || fail "stopping took $stop_seconds s"
}

mount_root() {
    ip link set lo up
    mount --make-rprivate /
    mount --bind "$root" "$root"
    mount -o remount,bind,ro "$root"
    mount -t sysfs -o ro,nosuid,nodev,noexec sysfs "$root/sys"
    mount -t tmpfs -o nosuid,nodev,noexec,mode=1777 tmpfs "$root/tmp"
    mount -t tmpfs -o nosuid,mode=755 tmpfs "$root/dev"
    local name
    for name in null zero full random urandom; do
        touch "$root/dev/$name"
        mount --bind "/dev/$name" "$root/dev/$name"
    done
    mkdir -m 1777 "$root/dev/shm"
    mount -o remount,ro "$root/dev"
}

COMPLETION='
import json, sys, urllib.request
body = json.dumps({"prompt": "Once", "max_tokens": 8, "ignore_eos": True, "temperature": 0}).encode()
asked = urllib.request.Request("http://127.0.0.1:8000/v1/completions", body, {"Content-Type": "application/json"})
answer = json.load(urllib.request.urlopen(asked, timeout=60))
sys.exit(0 if answer["usage"]["completion_tokens"] == 8 and answer["choices"][0]["finish_reason"] == "length" else
         f"unexpected answer: {answer}")
'
STREAM='
import json, sys, urllib.request
body = json.dumps({"prompt": "Once", "max_tokens": 150, "ignore_eos": True, "stream": True}).encode()
asked = urllib.request.Request("http://127.0.0.1:8000/v1/completions", body, {"Content-Type": "application/json"})
events = [line for line in urllib.request.urlopen(asked, timeout=60) if line.startswith(b"data:")
          and (print("event", flush=True) or True)]
sys.exit(0 if events[-1].strip() == b"data: [DONE]" else f"cut off after {events[-1]}")
'

KERNELS='
import sys
from octavo.engine.backends import native
found = native.current()
sys.exit(0 if found and found.threads() >= 1 else "the library of kernels is not there")
'

inside() {
    root=$1
    mapfile -t environment < <(fact Env)
    mapfile -t entrypoint < <(fact Entrypoint)
    mapfile -t command < <(fact Cmd)
    mapfile -t healthcheck < <(fact Healthcheck.Test | tail -n +2)
    user=$(fact User)
    workdir=$(fact WorkingDir)
    as_user=(setpriv --reuid="${user%%:*}" --regid="${user##*:}" --clear-groups --no-new-privs --inh-caps=-all
        --bounding-set=-all env -i "${environment[@]}")
    mount_root

    local begin status flag
    begin=$(now)
    start_service "${command[@]}"
    if run_in_container "${healthcheck[@]}" 2>"$work/health"; then fail "healthy before the model was loaded"; fi
    await_health
    start_seconds=$(since "$begin")
    passed "healthy $start_seconds s after its start, and not before: $(cat "$work/health")"

    status=$(cat "/proc/$service/status")
    [ "$(awk '/^NSpid/ {print $NF}' <<<"$status")" = 1 ] || fail "the service is not process 1"
    awk '/^Uid:|^Gid:/ {for (i = 2; i <= 5; i++) if ($i == 0) exit 1}' <<<"$status" || fail "runs as root"
    awk '/^Cap(Inh|Prm|Eff|Bnd):/ && $2 !~ /^0+$/ {exit 1}' <<<"$status" || fail "has capabilities"
    awk '/^NoNewPrivs:/ && $2 != 1 {exit 1}' <<<"$status" || fail "may gain privileges"
    passed "process 1, uid ${user%%:*}, no capabilities, no new privileges"

    if run_in_container touch /models/x 2>"$work/touch"; then fail "the root is writable"; fi
    grep -q "Read-only" "$work/touch" || fail "unexpected: $(cat "$work/touch")"
    run_in_container sh -c 'touch /tmp/x && rm /tmp/x'
    passed "the root is read-only, and /tmp is not"

    awk '$4 == "0A" && $2 == "00000000:1F40" {found = 1} END {exit !found}' "/proc/$service/net/tcp" ||
        fail "does not listen on 0.0.0.0, port 8000"
    run_in_container python3 -I -c "$COMPLETION" || fail "no completion"
    passed "listens on all addresses, and completes a prompt"

    run_in_container python3 -I -c "$KERNELS" 2>"$work/kernels" || fail "no kernels: $(tail -3 "$work/kernels")"
    passed "has its kernels built"

    mkfifo "$work/events"
    run_in_container python3 -I -c "$STREAM" >"$work/events" &
    local stream=$! events
    exec {events}<"$work/events"
    read -r -u "$events" _ || fail "the stream never began"
    cat <&"$events" >/dev/null &
    kill -0 "$stream" 2>/dev/null || fail "the stream was over before SIGTERM could be sent"
    stop_service
    wait "$stream" || fail "SIGTERM cut a running stream off"
    local drain_seconds=$stop_seconds
    passed "SIGTERM while a stream runs: the stream ends whole, and the service with status 0 after $stop_seconds s"

    for flag in --port=8001 --uds=/tmp/octavo.sock; do
        start_service serve "$flag"
        await_health
        stop_service
        passed "its health is found where a flag puts the service: $flag"
    done

    # torch keeps an empty folder of its own there.
    local left
    left=$(find "$root/tmp" -type s -o -type f -o -name 'octavo*')
    [ -z "$left" ] || fail "left in /tmp: $left"
    passed "leaves no socket and no file in /tmp"
    printf '{"start_seconds": %s, "drain_seconds": %s, "idle_stop_seconds": %s}\n' \
        "$start_seconds" "$drain_seconds" "$stop_seconds" >"$work/times.json"
}

# ---------------------------------------------------------------- outside

fact() { # KEY: of the image's configuration, one value a line
    python3 -c '
import json, sys
value = json.load(open(sys.argv[1]))["Docker"]["config"]
for name in sys.argv[2].split("."):
    value = value[name]
print(*(value if isinstance(value, list) else [value]), sep="\n")' "$work/image.json" "$1"
}

skip() { say "skipped: $*"; exit 77; }

make_base() {
    local suite=${DEBIAN_SUITE:-bookworm} container
    BASE_IMAGE=localhost/octavo-base:$suite
    if buildah inspect --type image "$BASE_IMAGE" >/dev/null 2>&1; then return; fi
    command -v debootstrap >/dev/null || skip "no base: debootstrap is not installed, and BASE_IMAGE is not set"
    say "making $BASE_IMAGE with debootstrap"
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates "$suite" "$work/base" \
        ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"} >"$work/debootstrap.log" || fail "debootstrap: $(tail -3 "$work/debootstrap.log")"
    (cd "$work/base" && rm -rf var/cache/apt/* var/lib/apt/lists/* var/log/* usr/share/doc/* usr/share/man/* usr/share/locale/*)
    tar -C "$work/base" -cf "$work/base.tar" .
    container=$(buildah from scratch)
    buildah add --quiet "$container" "$work/base.tar" / >/dev/null
    buildah commit --quiet --format docker "$container" "$BASE_IMAGE" >/dev/null
    buildah rm "$container" >/dev/null
    rm -rf --one-file-system "$work/base" "$work/base.tar"
}

check_contents() { # ROOT: what must not be in the image
    local found
    found=$(find "$1" -xdev \( -type f -o -type l \) -perm /111 \
        \( -name 'pip' -o -name 'pip3*' -o -name 'gcc*' -o -name 'g++*' -o -name 'cc' -o -name 'make' -o -name 'curl' \
        -o -name 'wget' -o -name 'ld' \) | head -5)
    [ -z "$found" ] || fail "tools that only building needs: $found"
    found=$(find "$1" -xdev -type d \( -name pip -o -name setuptools -o -name ensurepip -o -path '*/torch/include' \) | head -5)
    [ -z "$found" ] || fail "packages that only building needs: $found"
    passed "no pip, no setuptools, no compiler, no headers of torch"
}

write_result() {
    mkdir -p "$(dirname "$RESULT")"
    python3 - "$work" "$RESULT" "$root" "$BASE_IMAGE" "$SIZE_LIMIT" "$NOT_CHECKED" <<'PYTHON'
import glob
import json
import os
import platform
import sys

work, result, root, base, limit, not_checked = sys.argv[1:]
with open(f"{work}/image.json", encoding="utf-8") as file:
    layers = [layer["size"] for layer in json.loads(json.load(file)["Manifest"])["layers"]]
with open(f"{work}/times.json", encoding="utf-8") as file:
    times = json.load(file)
packages = dict(
    os.path.basename(path).removesuffix(".dist-info").rsplit("-", 1)
    for path in glob.glob(f"{root}/app/venv/lib/python3*/site-packages/*.dist-info")
)
facts = {
    "image": "cpu",
    "base": base,
    "size_bytes": sum(layers),
    "size_limit_bytes": int(limit),
    "layers_bytes": layers,
    **times,
    "torch": packages["torch"],
    "transformers": packages["transformers"],
    "machine": {
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
    },
    "not_checked": not_checked,
}
with open(result, "w", encoding="utf-8") as file:
    json.dump(facts, file, indent=2)
    file.write("\n")
print(f"test-image: {sum(layers) / 1e9:.2f} GB, goal {int(limit) / 1e9:.2f} GB; written to {result}", file=sys.stderr)
sys.exit(sum(layers) > int(limit))
PYTHON
}

clean_up() {
    [ -z "${container:-}" ] || buildah rm "$container" >/dev/null || true
    rm -rf --one-file-system "$work"
}

main() {
    [ "$(uname -s)" = Linux ] || skip "this needs Linux"
    [ "$(id -u)" = 0 ] || skip "this needs root, to build with chroot isolation and to mount"
    local tool
    for tool in buildah unshare nsenter ip python3; do
        command -v "$tool" >/dev/null || skip "$tool is not installed"
    done
    unshare --mount --net --pid --fork true 2>/dev/null || skip "no namespaces are to be had here"

    cd "$(dirname "$(readlink -f "$0")")/.."
    RESULT=${RESULT:-benchmarks/results/image-cpu.json}
    work=$(mktemp -d)
    trap clean_up EXIT
    local pull=--pull
    if [ -z "${BASE_IMAGE:-}" ]; then
        make_base
        pull=--pull-never
    fi

    say "building $IMAGE on $BASE_IMAGE"
    local arguments=(--build-arg "BASE_IMAGE=$BASE_IMAGE")
    [ -z "${TORCH_INDEX+set}" ] || arguments+=(--build-arg "TORCH_INDEX=$TORCH_INDEX")
    # shellcheck disable=SC2086 # BUILD_OPTIONS is several words
    buildah bud --isolation chroot --format docker $pull --layers --target cpu "${arguments[@]}" ${BUILD_OPTIONS:-} \
        --tag "$IMAGE" . >"$work/build.log" 2>&1 || { tail -30 "$work/build.log" >&2; fail "the build"; }
    buildah inspect --type image "$IMAGE" >"$work/image.json"
    [[ $(fact User) =~ ^[1-9][0-9]*:[1-9][0-9]*$ ]] || fail "the user is not numeric, or is root: $(fact User)"
    passed "built; its user is $(fact User), its health check: $(fact Healthcheck.Test | tr '\n' ' ')"

    container=$(buildah from --pull-never "$IMAGE")
    root=$(buildah mount "$container")
    check_contents "$root"
    # --kill-child: whatever ends this script ends all that it started, too.
    work=$work unshare --mount --net --pid --fork --kill-child --mount-proc bash deploy/test-image.sh inside "$root"
    write_result || fail "the image is over the limit"
    say "not checked here: $NOT_CHECKED"
    say "passed"
}

case ${1:-} in
inside) inside "$2" ;;
"") main ;;
*) say "takes no arguments; see its first lines"; exit 2 ;;
esac
