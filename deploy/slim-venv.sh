#!/bin/sh
# Takes out of a virtual environment what only building and testing need: headers, static libraries, tests, setuptools.
#   sh slim-venv.sh /app/venv
set -eu

cd "$1"/lib/python3*/site-packages

# torch refuses to be imported without its torch_shm_manager; the rest of its bin/ are tests and compilers.
find torch/bin -mindepth 1 -maxdepth 1 ! -name torch_shm_manager -exec rm -rf {} +
rm -rf torch/include torch/share torch/test
rm -f torch/lib/lib*_test.so torch/lib/libaoti_custom_ops.so torch/lib/libbackend_with_compiler.so

rm -rf nvidia/*/include nvidia/*/lib/stubs numpy/_core/include
find . -name '*.a' -delete
find numpy sympy networkx -depth -type d -name tests -exec rm -rf {} +

# torch requires setuptools for building extensions alone.
rm -rf setuptools setuptools-*.dist-info pkg_resources _distutils_hack distutils-precedence.pth
