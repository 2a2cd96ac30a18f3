#!/usr/bin/env bash
# Make environments for the peers below a folder; safe to repeat.
set -euo pipefail
dir="${1:?usage: setup.sh DIR}"
constraints="$(dirname "$0")/../../constraints.txt"
torch="$(grep '^torch==' "$constraints")"
mkdir -p "$dir"

if [ ! -e "$dir/imitation/.ready" ]; then
  python3 -m venv "$dir/imitation"
  "$dir/imitation/bin/pip" install --quiet "$torch" imitation==1.0.1
  touch "$dir/imitation/.ready"
fi

# DI-engine 0.5.3 asks for a setuptools that today's torch does not take: its needs are installed by name.
if [ ! -e "$dir/ding/.ready" ]; then
  python3 -m venv "$dir/ding"
  pip="$dir/ding/bin/pip"
  "$pip" install --quiet "setuptools==66.1.1" wheel "numpy<2"
  "$pip" install --quiet --no-build-isolation "gym==0.25.1"
  "$pip" install --quiet --no-deps "DI-engine==0.5.3" "yapf==0.29.0"
  "$pip" install --quiet "numpy<2" "$torch" gymnasium DI-treetensor DI-toolkit trueskill tensorboardX matplotlib easydict pyyaml \
    enum-tools cloudpickle hickle tabulate click "flask<=2.0.3" "werkzeug<=2.0.3" requests responses URLObject pynng sniffio redis \
    mpire einops "wandb<=0.19.0" pygame
  "$pip" install --quiet "setuptools==66.1.1"
  touch "$dir/ding/.ready"
fi

# rllte-core 1.0.1 pins old packages that its rewards do not use: what they use is installed by name.
if [ ! -e "$dir/rllte/.ready" ]; then
  python3 -m venv "$dir/rllte"
  "$dir/rllte/bin/pip" install --quiet -c "$constraints" torch numpy gymnasium termcolor==3.3.0 pynvml==11.5.0
  "$dir/rllte/bin/pip" install --quiet --no-deps rllte-core==1.0.1
  touch "$dir/rllte/.ready"
fi
