#!/usr/bin/env bash
# Makes deploy/chart/templates and deploy/chart/Chart.yaml from deploy/manifests, so that both have
# one source. The values, their schema and the helpers of the chart are written by hand.
#
#   deploy/chart.sh [DIR]     writes DIR/Chart.yaml and DIR/templates; deploy/chart by default
#
# Needs kubectl 1.21 or later, and python3.
set -euo pipefail
cd "$(dirname "$0")/.."
chart=${1:-deploy/chart}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for folder in deploy/manifests/overlays/*/; do
  overlay=$(basename "$folder")
  PREFIX=culvert.invalid/ TAG=0 deploy/manifests.sh "$overlay" "$work/$overlay.yaml" >/dev/null 2>"$work/errors" ||
    { cat "$work/errors" >&2; exit 1; }
done
. deploy/version.sh
mkdir -p "$chart/templates"
python3 deploy/chart.py "$work" deploy/examples/servicemonitor.yaml "$version" "$chart"
echo "chart: wrote $chart"
