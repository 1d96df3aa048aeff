#!/usr/bin/env bash
# Renders the overlay `plain` into deploy/manifests/install.yaml. Needs kubectl 1.20 or later.
set -euo pipefail
cd "$(dirname "$0")/.."
kubectl=$(command -v kubectl || true)
unpacked=${CARGO_TARGET_DIR:-target}/tools/root/usr/bin/kubectl
# Prefers the kubectl that tests/tools.sh unpacks. The order of objects depends on the version of
# kubectl.
if [ -x "$unpacked" ]; then kubectl=$unpacked; fi
[ -n "$kubectl" ] || { echo "manifests: needs kubectl; make tools brings one" >&2; exit 1; }
new=$(mktemp)
trap 'rm -f "$new"' EXIT
{
  echo "# Culvert in a cluster: kubectl apply -f install.yaml. Made from deploy/manifests by \`make manifests\`; do not edit."
  echo "# docs/tutorials/cluster.md has the steps."
  "$kubectl" kustomize deploy/manifests/overlays/plain
} >"$new"
cp "$new" deploy/manifests/install.yaml
chmod 0644 deploy/manifests/install.yaml
echo "manifests: wrote deploy/manifests/install.yaml"
