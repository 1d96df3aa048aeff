#!/usr/bin/env bash
# Builds an RPM package from each Debian package of deploy/packages.sh, with the same binaries, units,
# configuration and man pages. The same Debian packages result in the same bytes.
#
#   deploy/rpm.sh DIR     DIR contains culvert-tunnel-*.deb; prints the files that it adds
#
# Needs rpmbuild (Debian: rpm), which makes packages of any architecture. A removal keeps the data
# directory, as that of a Debian package; nothing is like a purge.
set -euo pipefail
cd "$(dirname "$0")/.."
umask 022
export LC_ALL=C TZ=UTC
folder=$(cd "$1" && pwd)

fail() { printf 'rpm: %s\n' "$*" >&2; exit 1; }

for program in rpmbuild dpkg-deb; do command -v "$program" >/dev/null || fail "needs $program; on Debian: apt-get install rpm"; done
. deploy/version.sh
. deploy/architecture.sh
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

field() { dpkg-deb -f "$deb" "$1"; }

# move FROM TO: moves a path of the tree to where distributions with RPM have it.
move() {
  [ -e "$tree/$1" ] || return 0
  mkdir -p "$(dirname "$tree/$2")"
  mv "$tree/$1" "$tree/$2"
}

# spec: prints the description of the package. A list of files ends it.
spec() {
  sed -e "/^@DESCRIPTION@\$/ { r $work/description
    d }" -e "/^@MESSAGE@\$/ { r $work/message
    d }" deploy/rpm/spec |
    sed -e "s|@PACKAGE@|$package|g; s|@PROGRAM@|$program|g; s|@VERSION@|${full%-*}|g; s|@RELEASE@|${full##*-}|g" \
      -e "s|@SUMMARY@|$(field Description | head -1)|; s|@TREE@|$tree|" -e "s|@MAINTAINER@|$(field Maintainer | sed 's/[&|\\]/\\&/g')|g"
  (cd "$tree" && find . -type f -printf '/%P\n' | sort | sed -e 's|^/etc/culvert/|%config(noreplace) &|' \
    -e 's|^/usr/share/licenses/|%license &|')
  echo "%dir /etc/culvert"
}

# build: makes the package of $deb.
build() {
  package=$(field Package) full=$(field Version) tree=$work/tree
  program=${package#culvert-}
  rm -rf "$tree"
  dpkg-deb -x "$deb" "$tree"
  move lib/systemd usr/lib/systemd
  move usr/share/zsh/vendor-completions usr/share/zsh/site-functions
  # The license is not among the files of these distributions.
  install -D -m 0644 LICENSE "$tree/usr/share/licenses/$package/LICENSE"
  rm -rf "$tree/lib" "$tree/usr/share/lintian" "$tree/usr/share/doc/$package"/{changelog.Debian.gz,copyright}
  field Description | sed -e 1d -e 's/^ //' >"$work/description"
  sed "s|@PACKAGE@|$package|g" "deploy/deb/$program.message" >"$work/message"
  spec >"$work/spec"
  rpmbuild -bb --quiet --nodeps --target "$(machine "$(field Architecture)")-linux" \
    --define "_topdir $work/build" --define "_rpmdir $folder" --define '_rpmfilename %{name}-%{version}-%{release}.%{_target_cpu}.rpm' \
    --define 'debug_package %{nil}' --define '__os_install_post %{nil}' --define '_build_id_links none' \
    --define '_binary_payload w6.xzdio' --define '_buildhost culvert.invalid' \
    --define 'use_source_date_epoch_as_buildtime 1' --define 'clamp_mtime_to_source_date_epoch 1' --define 'source_date_epoch_from_changelog 0' \
    "$work/spec" >"$work/log" 2>&1 || { cat "$work/log" >&2; fail "cannot build $package"; }
  echo "$folder/$package-${full}.$(machine "$(field Architecture)").rpm"
}

for deb in "$folder"/culvert-tunnel-*.deb; do
  [ -f "$deb" ] || fail "$folder has no culvert-tunnel-*.deb"
  build
done
