#!/usr/bin/env bash
# bash examples/embodiment/collect_data.sh [NAME] [overrides]: record a robot as config/NAME.yaml says (by default
# realworld_collect_data) into logs/<timestamp>/data.pkl.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export EMBODIED_PATH="${EMBODIED_PATH:-$here}"
name="realworld_collect_data"
if [ $# -gt 0 ] && [[ "$1" != *=* ]] && [[ "$1" != -* ]]; then
  name="$1"
  shift
fi
exec guerdon collect --config-path "$here/config" --config-name "$name" \
  "collect.save_dir=logs/$(date +%Y%m%d-%H%M%S)" "$@"
