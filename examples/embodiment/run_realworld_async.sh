#!/usr/bin/env bash
# bash examples/embodiment/run_realworld_async.sh NAME [overrides]: train on a robot as config/NAME.yaml says.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export EMBODIED_PATH="${EMBODIED_PATH:-$here}"
name="${1:?usage: run_realworld_async.sh NAME [overrides]}"
shift
exec guerdon train --config-path "$here/config" --config-name "$name" "$@"
