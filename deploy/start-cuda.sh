#!/bin/sh
# Brings the kernels that the image was built with to the folder where Triton looks for them, which may be a volume, and
# starts Octavo. What could not be copied is compiled when it is first used.
cp -ru /kernels/. "$TRITON_CACHE_DIR" || echo "Not all kernels of the image are in $TRITON_CACHE_DIR." >&2
exec octavo "$@"
