#!/usr/bin/env bash
# bash examples/reward/run_reward_training.sh [--data DIR] [overrides]: fit a reward model on real-robot data, that of
# DIR or of fit.data.path in config/reward_training.yaml.
# The best model is saved as checkpoints/best_model in runner.logger.log_path.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
data=""
overrides=()
while [ $# -gt 0 ]; do
  case "$1" in
    --data) data="${2:?--data needs a directory}"; shift 2 ;;
    *) overrides+=("$1"); shift ;;
  esac
done
if [ -n "$data" ]; then
  overrides=("fit.data.path=$data" "${overrides[@]}")
fi
exec guerdon train-reward --config-path "$here/config" --config-name reward_training "${overrides[@]}"
