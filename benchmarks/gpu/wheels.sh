#!/usr/bin/env bash
# Wheels for a GPU machine without a network, Linux x86-64 with Python 3.12, that has torch, Triton, numpy, pytest,
# hypothesis, safetensors and tokenizers of its own: what mpctl and its tests need besides, but for matplotlib and
# scipy, which charts and fits alone import. Versions as in constraints.txt, 12 MB. Where there is a network, in the project's folder:
#   bash benchmarks/gpu/wheels.sh FOLDER
# There:
#   python3 -m pip install -q --no-index --no-deps --no-compile --target site FOLDER/*.whl
#   export PYTHONPATH=$PWD/site:$PWD        # what mpctl starts does not import from the current folder
set -euo pipefail
folder=${1:?a folder for the wheels}
names='typer|click|shellingham|annotated[-_]doc|rich|markdown[-_]it[-_]py|mdurl|pygments'
names+='|pydantic|pydantic[-_]core|annotated[-_]types|typing[-_]inspection|typing[-_]extensions'
names+='|zstandard|plotext|psutil|pyyaml|pytest[-_]timeout'
pins=$(grep -iE "^($names)==" constraints.txt)
platforms=$(printf -- '--platform %s ' manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 \
    manylinux2014_x86_64 manylinux1_x86_64)
mkdir -p "$folder"
# shellcheck disable=SC2086
"${PYTHON:-python3}" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    $platforms -d "$folder" $pins
ls "$folder"
