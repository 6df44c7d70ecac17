#   docker build -t octavo .                                          for a CPU; for a GPU: --target cuda -t octavo:cuda
#   docker run --rm -p 127.0.0.1:8000:8000 octavo                     the bundled demo
#   docker run -d --restart on-failure --memory 8g --memory-swap 8g --pids-limit 1024 -p 127.0.0.1:8000:8000 octavo
#                                                                     the same as a service: limited, started again
#   docker run --rm -p 127.0.0.1:8000:8000 -v "$PWD/models:/models:ro" octavo serve /models/NAME
#
# BASE_IMAGE is any Debian-like image with Python 3.11 or newer and its venv module; tools/pin_images.py renews the digest.
# KERNELS is what benchmarks/gpu_cache.py is told to compile into the image for GPUs. Unless told, that is what the demo
# and two models need on six generations of GPUs: 12 minutes and 4 GB of memory. Where it is empty, kernels are compiled
# at their first use:
#   docker build --target cuda --build-arg KERNELS="--models Qwen3-0.6B --capabilities 90" -t octavo:cuda .
# TORCH_INDEX is the package index that torch alone comes from; an empty one means pip's configured index. All else is
# installed by the hashes of requirements/, which tools/lock.py writes.

ARG BASE_IMAGE=python:3.12.14-slim-bookworm@sha256:782412e85d0f0984994c290652577d4018aff08145c85b262bb63dc0c7522254

# ---- builder: pip lives in an environment of its own, so that the one that is shipped, /app/venv, never holds it
FROM ${BASE_IMAGE} AS builder

ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PIP_PYTHON=/app/venv/bin/python3

RUN python3 -m venv /build && python3 -m venv --without-pip /app/venv
# Python's headers, where it has them.
RUN mkdir /headers && found=$(python3 -c "import sysconfig; print(sysconfig.get_path('include'))") \
 && if [ -d "$found" ]; then cp --recursive --parents "$found" /headers; fi
ENV PATH=/build/bin:$PATH

WORKDIR /src
COPY pyproject.toml constraints.txt deploy/slim-venv.sh ./
COPY requirements requirements

# ---- what Octavo needs, for a CPU. torch is pinned by its version alone: PyTorch's index has files of its own for CPUs,
# other ones than PyPI, whose hashes are the lock's. (The linter wants to read the version here: constraints.txt holds it.)
FROM builder AS libraries-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# hadolint ignore=DL3013
RUN pip install --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' constraints.txt)"
RUN pip install --require-hashes --no-deps --requirement requirements/serve.lock \
 && pip check && sh slim-venv.sh /app/venv

# ---- the same for an NVIDIA GPU: on Linux, torch's build on PyPI is the one for CUDA. That of another index, and what it
# needs, is pinned by torch's version alone.
FROM builder AS libraries-cuda
ARG TORCH_INDEX=
RUN pip install --require-hashes --no-deps --requirement requirements/serve.lock
# hadolint ignore=DL3013
RUN if [ -z "$TORCH_INDEX" ]; then pip install --require-hashes --no-deps --requirement requirements/torch-cuda.lock; \
    else torch=$(grep '^torch==' constraints.txt) && pip install --no-deps --index-url "$TORCH_INDEX" "$torch" \
      && pip install --constraint constraints.txt "$torch"; fi \
 && pip check && sh slim-venv.sh /app/venv

# ---- Octavo alone: a layer of its own, small, because it changes more often than what it needs
FROM builder AS octavo
# ziglang is a C++ compiler that pip can install.
RUN PIP_PYTHON=/build/bin/python3 pip install --require-hashes --no-deps --requirement requirements/build.lock
COPY README.md LICENSE setup.py ./
COPY octavo octavo
COPY engine engine
COPY server server
COPY cli cli
# The kernels are compiled for all instruction sets, since what runs has no compiler, nor a cache that stays.
RUN PIP_PYTHON=/build/bin/python3 pip install --no-deps --no-build-isolation --prefix /app/octavo . \
 && sed -i '1s|^#!.*|#!/app/venv/bin/python3|' /app/octavo/bin/octavo \
 && CXX="/build/bin/python3 -m ziglang c++" python3 /app/octavo/lib/python3*/site-packages/octavo/engine/backends/native/build.py

# ---- kernels for GPUs, compiled without one for the folder that Triton will use. It knows them by their source, not by
# the packages that they are in.
FROM builder AS kernels
ARG KERNELS="--models Qwen3-0.6B Llama-3.1-8B --config demo.json --capabilities 80 86 89 90 100 120"
# For Triton's module that starts kernels.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=libraries-cuda /app/venv /app/venv
COPY engine engine
COPY benchmarks/gpu_cache.py benchmarks/
COPY benchmarks/gpu_parts benchmarks/gpu_parts
COPY server/demo/chat/config.json demo.json
# KERNELS is several words.
# hadolint ignore=SC2086
RUN mkdir /kernels \
 && if [ -n "$KERNELS" ]; then \
      /app/venv/bin/python3 benchmarks/gpu_cache.py --cache /kernels --home /triton $KERNELS \
      || echo "Some kernels are missing: they will be compiled when they are first used." >&2; \
    fi

# ---- what runs: Python, no build tools, no root. The user is named by number, so that an orchestrator can see that it
# is not root. /models belongs to it: a volume mounted there for the first time takes that over, and downloads are kept
# in it.
FROM ${BASE_IMAGE} AS runtime

LABEL org.opencontainers.image.title="Octavo" \
      org.opencontainers.image.description="Serves the transformer family over HTTP" \
      org.opencontainers.image.licenses="Apache-2.0"

RUN mkdir -p /models/hub && chown -R 10001:10001 /models \
 && rm -rf /usr/local/lib/python3*/site-packages/* /usr/local/bin/pip* /usr/local/include /usr/include \
           /usr/lib/python3*/ensurepip /usr/local/lib/python3*/ensurepip /usr/share/python-wheels

# LOGNAME: the number has no entry in /etc/passwd, and some libraries insist on a name.
ENV PATH=/app/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    LOGNAME=octavo \
    HOME=/tmp \
    HF_HOME=/models/hub \
    OCTAVO_QUANTIZATION_CACHE=/models/quantization \
    OCTAVO_HOST=0.0.0.0

WORKDIR /models
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM

# The first success ends the start period, so its length costs nothing; it has to cover the download of a model.
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s --retries=3 \
    CMD ["python3", "-I", "-m", "octavo.cli.healthcheck"]

ENTRYPOINT ["octavo"]
CMD ["serve"]

# ---- the targets
FROM runtime AS cuda
# Triton compiles what /kernels lacks while it serves, and a module in C that starts kernels, for which there are a
# compiler and Python's headers here. All is kept in /triton, which may be a volume.
USER 0:0
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=builder /headers /
RUN mkdir /triton && chown 10001:10001 /triton
COPY --from=kernels /kernels /kernels
COPY deploy/start-cuda.sh /app/start
USER 10001:10001
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    TRITON_CACHE_DIR=/triton
COPY --from=libraries-cuda /app/venv /app/venv
COPY --from=octavo /app/octavo /app/venv
ENTRYPOINT ["/app/start"]
CMD ["serve"]

FROM runtime AS cpu
COPY --from=libraries-cpu /app/venv /app/venv
COPY --from=octavo /app/octavo /app/venv
