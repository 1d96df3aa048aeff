#!/usr/bin/env bash
# Builds the two images with docker, buildah or podman, whichever is available.
#
#   PREFIX=registry.example.com/culvert/ deploy/images.sh
#
#   PREFIX=localhost/culvert/       names images that no registry holds
#   TAG=0.1.0                       the version by default
#   BINARIES=DIR                    uses the static DIR/tunnel-server and DIR/tunnel-agent; otherwise
#                                   builds static binaries first
#   ENGINE=podman                   uses this engine only
#   TARGETARCH=arm64                builds for another architecture; see deploy/static.sh
#
# The images are ${PREFIX}tunnel-server:$TAG and ${PREFIX}tunnel-agent:$TAG. The script pushes
# nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
target=${CARGO_TARGET_DIR:-target}

say() { printf 'images: %s\n' "$*"; }
fail() { say "$*" >&2; exit 1; }

. deploy/image-names.sh
. deploy/version.sh
. deploy/architecture.sh
prefix=${PREFIX-}
tag=${TAG:-$version}
check_prefix "$prefix" || fail "images have no name"
check_tag "$tag" || fail "images have no name"

works() {
  case $1 in
    docker) command -v docker >/dev/null && docker version >/dev/null 2>&1 ;;
    *) command -v "$1" >/dev/null ;;
  esac
}

engine=${ENGINE:-}
if [ -n "$engine" ]; then
  works "$engine" || fail "$engine does not work here"
else
  for candidate in docker buildah podman; do
    if works "$candidate"; then engine=$candidate; break; fi
  done
  [ -n "$engine" ] || fail "needs docker (with its daemon running), buildah or podman; on Debian: apt-get install podman runc netavark"
fi

arch=${TARGETARCH:-$(this_architecture)}
binaries=${BINARIES:-}
if [ -z "$binaries" ]; then
  say "building static binaries (the first time takes some minutes)"
  binaries=$(deploy/static.sh "$(triple "$arch")")
fi

context=$target/images
rm -rf "$context"
mkdir -p "$context/$arch" "$context/data"
for name in tunnel-server tunnel-agent; do
  [ -f "$binaries/$name" ] || fail "$binaries/$name is missing"
  found=$(architecture "$binaries/$name") || fail "$found"
  [ "$found" = "$arch" ] || fail "$binaries/$name is for $found, not for $arch"
  if command -v file >/dev/null && file -bL "$binaries/$name" | grep -q 'dynamically linked'; then
    fail "$binaries/$name needs shared libraries, which the image does not have; deploy/static.sh builds one that does not"
  fi
  install -m 0755 "$binaries/$name" "$context/$arch/$name"
done
# The folder becomes the data directory, which only its owner may access.
chmod 0700 "$context/data"

revision=$(git -C "$root" rev-parse HEAD 2>/dev/null || echo unknown)
common=(--build-arg "TARGETARCH=$arch" --build-arg "VERSION=$version" --build-arg "REVISION=$revision" -f deploy/docker/Dockerfile)
for part in server agent; do
  name=${prefix}tunnel-$part:$tag
  say "building $name with $engine for $arch"
  case $engine in
    docker) docker build --platform "linux/$arch" --target "$part" -t "$name" "${common[@]}" "$context" >/dev/null ;;
    buildah) buildah bud --format docker ${SOURCE_DATE_EPOCH:+--timestamp "$SOURCE_DATE_EPOCH"} --platform "linux/$arch" --target "$part" -t "$name" "${common[@]}" "$context" >/dev/null ;;
    podman) podman build --layers=false --format docker ${SOURCE_DATE_EPOCH:+--timestamp "$SOURCE_DATE_EPOCH"} --platform "linux/$arch" --target "$part" -t "$name" "${common[@]}" "$context" >/dev/null ;;
    *) fail "no such engine: $engine" ;;
  esac
  size=$(stat -c %s "$context/$arch/tunnel-$part")
  say "$name holds a binary of $((size / 1048576)) MiB ($size bytes)"
done
