#!/usr/bin/env bash
# install.sh VENV REQUIREMENT...: installs into an environment, in the versions of constraints.txt.
# torch by pip, which finds a CPU build where an index of its settings offers one. The rest by uv, in
# a fifth of the time, and by pip again where uv does not reach an index.
set -euo pipefail

venv=$1
shift
versions=(-q -c "$(dirname "$0")/../constraints.txt")
export PIP_DISABLE_PIP_VERSION_CHECK=1 UV_SYSTEM_CERTS=1
"$venv/bin/python" -m pip install "${versions[@]}" torch uv
"$venv/bin/uv" pip install --python "$venv/bin/python" "${versions[@]}" "$@" ||
    "$venv/bin/python" -m pip install "${versions[@]}" "$@"
