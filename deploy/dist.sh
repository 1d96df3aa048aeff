#!/usr/bin/env bash
# Builds everything that a release has, of one version and one commit, for each architecture:
#
#   tunnel-server-LABEL-linux-ARCH               static binary; tunnel-agent likewise
#   tunnel-server-LABEL-linux-ARCH.cdx.json      its bill of materials (CycloneDX)
#   culvert-tunnel-server_LABEL-1_ARCH.deb       Debian package
#   culvert-tunnel-server-LABEL-1.MACHINE.rpm    RPM package
#   tunnel-server-LABEL.oci.tar                  image for all of the architectures, an OCI layout
#   SHA256SUMS                                   of all files above
#
# LABEL is the version at its tag, and VERSION~TIME.COMMIT elsewhere. The same commit, binaries and
# tools result in the same bytes.
#
#   ARCH=arm64        builds for this architecture only; otherwise for amd64 and arm64
#   VERSION=0.1.0     fails if the sources are of another version, or not those of its tag
#   BINARIES=DIR      uses the static DIR/ARCH/tunnel-server and tunnel-agent; otherwise builds them
#   OUT=DIR           target/dist by default; its content is replaced
#
# Needs a clean clone, dpkg-deb, rpmbuild, podman, python3 and what deploy/static.sh needs (Debian:
# rpm podman crossbuild-essential-arm64 qemu-user-static). tests/dist.sh checks the result.
set -euo pipefail
cd "$(dirname "$0")/.."
umask 022
export LC_ALL=C TZ=UTC
. deploy/version.sh
. deploy/architecture.sh
. deploy/podman-store.sh

say() { printf 'dist: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

[ -z "${VERSION:-}" ] || [ "$VERSION" = "$label" ] || fail "VERSION=$VERSION, but the sources are $label"
[ -z "$(git status --porcelain 2>/dev/null)" ] || fail "the clone has changes that no commit has; commit or stash them first"
[ -n "$commit" ] && [ -n "$SOURCE_DATE_EPOCH" ] || fail "not a git clone: set CULVERT_COMMIT and SOURCE_DATE_EPOCH"
for program in dpkg-deb rpmbuild podman python3 cc; do
  command -v "$program" >/dev/null || fail "needs $program; on Debian: apt-get install rpm podman python3 gcc"
done
read -ra architectures <<<"${ARCH:-amd64 arm64}"
for arch in "${architectures[@]}"; do
  [ "$(machine "$arch")" != "unknown-$arch" ] || fail "ARCH=$arch is not amd64 or arm64"
done
out=${OUT:-${CARGO_TARGET_DIR:-target}/dist}
work=$(mktemp -d)
trap 'podman --log-level fatal rmi -a -f >/dev/null 2>&1 || true; rm -rf "$work" || true' EXIT
podman_store "$work/store"
rust=$("${RUSTC:-rustc}" -vV | sed -n 's/^release: //p')

# glibc: prints the version of the C library that the binaries for $arch are linked with.
glibc() {
  "$(command -v "$(machine "$arch")-linux-gnu-gcc" || echo cc)" -dM -E -include features.h - </dev/null |
    awk '$2 == "__GLIBC__" { major = $3 } $2 == "__GLIBC_MINOR__" { minor = $3 } END { print major "." minor }'
}

# binaries: prints the folder of the binaries for $arch, which it builds if none is given.
binaries() {
  if [ -n "${BINARIES:-}" ]; then echo "$BINARIES/$arch"; else deploy/static.sh "$(triple "$arch")"; fi
}

# programs: adds the binaries for $arch and their bills of materials.
programs() {
  local program name found
  for program in tunnel-server tunnel-agent; do
    found=$(architecture "$folder/$program") || fail "$found"
    [ "$found" = "$arch" ] || fail "$folder/$program is for $found, not for $arch"
    name=$program-$label-linux-$arch
    install -m 0755 "$folder/$program" "$work/out/$name"
    python3 deploy/sbom.py "$work/out/$name" "$program" "$(triple "$arch")" "$version" "$commit" \
      "$(commit_time +%FT%TZ)" "rust-std=$rust" "glibc=$(glibc)" >"$work/out/$name.cdx.json"
  done
}

# packages: adds the packages for $arch.
packages() {
  BINARIES=$folder ARCH=$arch OUT=$work/packages DEB_VERSION=$label-1 deploy/packages.sh >/dev/null
  deploy/rpm.sh "$work/packages" >/dev/null
  mv "$work"/packages/*.deb "$work"/packages/*.rpm "$work/out/"
}

# images PROGRAM: adds the image of a program for all architectures.
images() {
  local list=localhost/culvert/$1:dist arch layout=$work/layout-$1 members=()
  for arch in "${architectures[@]}"; do members+=("containers-storage:localhost/culvert/$1:$arch"); done
  podman --log-level fatal manifest create "$list" "${members[@]}" >/dev/null
  podman --log-level fatal manifest push --all --format oci "$list" "oci:$layout:${label//\~/-}" >/dev/null 2>&1 ||
    fail "podman cannot write the image of $1"
  tar -C "$layout" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" -cf "$work/out/$1-$label.oci.tar" .
}

mkdir "$work/out"
for arch in "${architectures[@]}"; do
  start=$SECONDS
  folder=$(binaries)
  say "$arch: binaries after $((SECONDS - start)) s"
  programs
  packages
  ENGINE=podman PREFIX=localhost/culvert/ TAG=$arch TARGETARCH=$arch BINARIES=$folder CARGO_TARGET_DIR=$work/images deploy/images.sh >/dev/null
done
images tunnel-server
images tunnel-agent
(cd "$work/out" && sha256sum -- * >"$work/SHA256SUMS" && mv "$work/SHA256SUMS" .)
rm -rf "$out"
mkdir -p "$(dirname "$out")"
mv "$work/out" "$out"
say "$label of commit $commit, for ${architectures[*]}, is in $out"
(cd "$out" && wc -c -- * | sed '$d') >&2
