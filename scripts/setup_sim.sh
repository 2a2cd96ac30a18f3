#!/usr/bin/env bash
# Give the ManiSkill simulator a Vulkan device to render with; safe to repeat, does nothing where one works.
#
# Usage: scripts/setup_sim.sh PYTHON      (the interpreter that has `guerdon[maniskill]`)
#
# SAPIEN needs VK_KHR_external_semaphore_fd, which Mesa's software driver has since 24.3. Debian 12 ships an
# older one, so there the driver comes from the backports suite, added by copying the machine's own apt entry.
set -euo pipefail
python="${1:?usage: $0 PYTHON}"
oldest=24.3
packages=(mesa-vulkan-drivers libvulkan1 libgl1 libglib2.0-0) # the last two for OpenCV, which ManiSkill imports

works() { "$python" -c "import cv2" 2>/dev/null && "$python" -m guerdon.envs.maniskill.vulkan; }

if works; then
  exit 0
fi
if ! command -v apt-get >/dev/null; then
  echo "setup-sim: no Vulkan device works, and this is no Debian-like system: install a GPU driver, or Mesa's" \
    "software driver (lavapipe) $oldest or newer, by your system's own means" >&2
  exit 1
fi
sudo="$(test "$(id -u)" = 0 || echo sudo)"
export DEBIAN_FRONTEND=noninteractive
codename="$(. /etc/os-release && echo "${VERSION_CODENAME:-}")"
backports="$codename-backports"

offered() { # the version of a package that apt would install, from suite $2 if that is given
  apt-cache policy "${@:2}" "$1" | sed -n 's/^ *Candidate: //p'
}

add_backports() { # the entry that offers $codename, with the suite's name exchanged
  local entries=/etc/apt/sources.list.d new=/etc/apt/sources.list.d/guerdon-backports
  if apt-cache policy | grep -q "a=[a-z]*-backports\|n=$backports"; then
    return
  fi
  local file
  for file in "$entries"/*.sources; do
    [ -e "$file" ] || continue
    # Paragraph mode: one stanza at a time; the first one whose suites include the release itself.
    local stanza
    stanza="$(awk -v RS= -v name="$codename" '{
      line = $0; gsub(/\n/, " ", line)
      if (line ~ ("Suites:[^:]*[ ]" name "([ ]|$)")) { print; exit }
    }' "$file" | grep -v '^#' | sed "s/^Suites:.*/Suites: $backports/")"
    if [ -n "$stanza" ]; then
      echo "$stanza" | $sudo tee "$new.sources" >/dev/null
      return
    fi
  done
  local line
  line="$(grep -hE "^deb [^#]* $codename( |$)" /etc/apt/sources.list "$entries"/*.list 2>/dev/null | head -1 || true)"
  if [ -z "$line" ]; then
    echo "setup-sim: no apt entry offers $codename, so there is none to copy for $backports" >&2
    exit 1
  fi
  echo "$line" | sed "s/ $codename\b/ $backports/" | $sudo tee "$new.list" >/dev/null
}

$sudo apt-get update -qq
from=()
if ! dpkg --compare-versions "$(offered mesa-vulkan-drivers)" ge "$oldest"; then
  echo "setup-sim: $codename has no mesa-vulkan-drivers of $oldest or newer; taking it from $backports"
  add_backports
  $sudo apt-get update -qq
  from=(-t "$backports")
  if ! dpkg --compare-versions "$(offered mesa-vulkan-drivers "${from[@]}")" ge "$oldest"; then
    echo "setup-sim: $backports has none either; install Mesa $oldest or newer, or a GPU driver" >&2
    exit 1
  fi
fi
$sudo apt-get install -y -qq --no-install-recommends "${from[@]}" "${packages[@]}"
works
