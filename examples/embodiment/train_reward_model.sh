#!/usr/bin/env bash
# bash examples/embodiment/train_reward_model.sh [NAME] [overrides]: fit a reward model as config/NAME.yaml says.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export EMBODIED_PATH="${EMBODIED_PATH:-$here}"
name="${1:-train_reward_model}"
shift || true
exec guerdon train-reward --config-path "$here/config" --config-name "$name" "$@"
