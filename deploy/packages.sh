#!/usr/bin/env bash
# Builds the Debian packages culvert-tunnel-server and culvert-tunnel-agent, and SHA256SUMS. The
# same commit and binaries result in the same bytes.
#
#   deploy/packages.sh
#
#   BINARIES=DIR         uses DIR/tunnel-server and DIR/tunnel-agent; otherwise builds static ones
#                        for this machine first
#   ARCH=arm64           fails if the binaries are for another architecture; by default theirs
#   DEB_VERSION=0.1.0-2  version of the packages; by default VERSION-1 at the tag vVERSION, and
#                        VERSION~TIME.COMMIT-1, which is lower, at other commits
#   MAINTAINER='N <A>'   maintainer in the packages; by default the author of the commit
#   OUT=DIR              target/packages by default
#
# Completions come from the binaries, which qemu-user-static runs for another architecture. Without
# it, packages for another architecture have no completions.
set -euo pipefail
cd "$(dirname "$0")/.."
umask 022
export LC_ALL=C TZ=UTC DPKG_DEB_THREADS_MAX=1

say() { printf 'packages: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

command -v dpkg-deb >/dev/null || fail "needs dpkg-deb"
. deploy/version.sh
. deploy/architecture.sh
[ -n "$SOURCE_DATE_EPOCH" ] || fail "not a git clone: set SOURCE_DATE_EPOCH"
if [ -z "${DEB_VERSION:-}" ]; then
  [ -n "$commit" ] || fail "not a git clone: set DEB_VERSION"
  DEB_VERSION=$label-1
fi
MAINTAINER=${MAINTAINER:-$(git log -1 --format='%an <%ae>' 2>/dev/null)} || fail "not a git clone: set MAINTAINER"
binaries=${BINARIES:-}
if [ -z "$binaries" ]; then
  say "building static binaries (the first time takes some minutes)"
  binaries=$(deploy/static.sh)
fi
out=${OUT:-${CARGO_TARGET_DIR:-target}/packages}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# libraries FILE: prints what a binary with shared libraries depends on.
libraries() {
  command -v dpkg-shlibdeps >/dev/null || fail "$1 has shared libraries, and dpkg-shlibdeps (package dpkg-dev) is not installed"
  mkdir -p "$work/source/debian"
  : >"$work/source/debian/control"
  (cd "$work/source" && dpkg-shlibdeps -O "$1" 2>/dev/null) | sed -n 's/^shlibs:Depends=/, /p'
}

# fill NAME FILE: prints a file of deploy/deb with its placeholders replaced, and the message of
# the package in place of its line.
fill() {
  local maintainer
  maintainer=$(sed 's/[&|\\]/\\&/g' <<<"$MAINTAINER")
  sed -e "/^@MESSAGE@\$/ { r deploy/deb/$program.message
    d }" "deploy/deb/$1" |
    sed -e "s|@PACKAGE@|$package|g; s|@PROGRAM@|$program|g; s|@VERSION@|$DEB_VERSION|g; s|@ARCH@|$arch|g" \
      -e "s|@MAINTAINER@|$maintainer|g; s|@SIZE@|${size:-}|g; s|@LIBRARIES@|${libraries:-}|g; s|@YEAR@|$(commit_time +%Y)|g"
}

# put MODE FILE: writes standard input to a file of the package.
put() {
  install -D -m "$1" /dev/stdin "$root/$2"
}

# completions: writes the scripts that the binary prints.
completions() {
  local printed binary
  mapfile -t binary < <(runner "$arch"; echo "$root/usr/bin/$program")
  if ! printed=$("${binary[@]}" version 2>/dev/null); then
    say "this machine cannot run $program for $arch: $package has no completions"
    return 0
  fi
  [ "$printed" = "$program $version" ] || fail "the binary is '$printed', and this is version $version"
  "${binary[@]}" completion bash | put 0644 "usr/share/bash-completion/completions/$program"
  "${binary[@]}" completion zsh | put 0644 "usr/share/zsh/vendor-completions/_$program"
  "${binary[@]}" completion fish | put 0644 "usr/share/fish/vendor_completions.d/$program.fish"
}

# documents: writes man page, changelogs and copyright.
documents() {
  local documents=usr/share/doc/$package
  python3 deploy/deb/man.py "docs/reference/$program.md" "$version" "$(commit_time +%F)" | gzip -9n | put 0644 "usr/share/man/man8/$program.8.gz"
  fill copyright | put 0644 "$documents/copyright"
  gzip -9n <CHANGELOG.md | put 0644 "$documents/changelog.gz"
  gzip -9n <<END | put 0644 "$documents/changelog.Debian.gz"
culvert ($DEB_VERSION) unstable; urgency=medium

  * Version $version; changelog.gz lists the changes.

 -- $MAINTAINER  $(commit_time -R)
END
}

# package PROGRAM: builds a package.
package() {
  program=$1 package=culvert-$1 root=$work/$1
  [ -f "$binaries/$program" ] || fail "$binaries/$program is missing"
  arch=$(architecture "$binaries/$program") || fail "$arch"
  [ "${ARCH:-$arch}" = "$arch" ] || fail "$binaries/$program is for $arch, not for $ARCH"
  install -D -m 0755 "$binaries/$program" "$root/usr/bin/$program"
  # Static binaries name no loader.
  if LC_ALL=C grep -aqE '/lib(64)?/ld-linux-[a-z0-9-]+\.so' <(head -c 4096 "$root/usr/bin/$program"); then
    libraries=$(libraries "$root/usr/bin/$program")
  else
    libraries=
    fill lintian-overrides | put 0644 "usr/share/lintian/overrides/$package"
  fi

  fill unit.sed >"$work/unit.sed"
  sed -f "$work/unit.sed" "deploy/systemd/$program.service" | put 0644 "lib/systemd/system/$program.service"
  fill system.preset | put 0644 "lib/systemd/system-preset/50-$package.preset"
  fill sysusers.conf | put 0644 "usr/lib/sysusers.d/$package.conf"
  fill sysctl.conf | put 0644 "usr/lib/sysctl.d/10-$package.conf"
  fill "$program.yaml" | put 0644 "etc/culvert/$program.yaml"
  completions
  documents

  # As dpkg-gencontrol counts: KiB of each file, and one for each folder.
  size=$(find "$root" -printf '%y %s\n' | awk '{ n += $1 == "f" ? int(($2 + 1023) / 1024) : 1 } END { print n }')
  { fill control; cat "deploy/deb/$program.description"; } | put 0644 DEBIAN/control
  echo "/etc/culvert/$program.yaml" | put 0644 DEBIAN/conffiles
  for script in postinst prerm postrm; do fill $script | put 0755 DEBIAN/$script; done
  (cd "$root" && find . '(' -path ./DEBIAN -o -path ./etc ')' -prune -o -type f -printf '%P\0' | sort -z | xargs -0 md5sum) | put 0644 DEBIAN/md5sums
  find "$root" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
  dpkg-deb --root-owner-group -Zxz --build "$root" "$out/${package}_${DEB_VERSION}_$arch.deb" >/dev/null
  echo "$out/${package}_${DEB_VERSION}_$arch.deb"
}

mkdir -p "$out"
rm -f "$out"/culvert-tunnel-*.deb "$out/SHA256SUMS"
package tunnel-server
package tunnel-agent
(cd "$out" && sha256sum culvert-tunnel-*.deb >SHA256SUMS)
