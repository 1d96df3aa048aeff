#!/usr/bin/env bash
# Unpacks a Rust compiler of Debian's packages with the standard library for another architecture
# under target/tools, and prints its path. For machines on which `rustup target add` cannot fetch the
# standard library. The compiler is of another version than that of rust-toolchain.toml. Installs
# nothing, needs no root, and changes neither the package lists nor the architectures of the system.
#
#   RUSTC=$(deploy/debian-rust.sh arm64) deploy/static.sh aarch64-unknown-linux-gnu
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/architecture.sh
foreign=$1

say() { printf 'debian-rust: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

for program in apt-get dpkg-deb; do command -v "$program" >/dev/null || fail "needs $program"; done
native=$(dpkg --print-architecture)
needed=$(sed -n '/^\[workspace.package\]/,/^\[/ s/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
folder=${CARGO_TARGET_DIR:-target}/tools/debian-rust-$foreign
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
if [ -x "$folder/rustc" ] && "$folder/rustc" -V >/dev/null 2>&1; then echo "$folder/rustc"; exit 0; fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 0755 "$work"
mkdir -p "$work"/{lists,archives}/partial "$work/debs"
options=(-q -o "APT::Architectures::=$native" -o "APT::Architectures::=$foreign" -o "Dir::State::Lists=$work/lists"
  -o "Dir::Cache=$work" -o "Dir::Cache::Archives=$work/archives" -o APT::Sandbox::User= -o Acquire::Languages=none)
# Sources without this architecture make the command fail, and the others are of use.
apt-get "${options[@]}" update >"$folder/apt.log" 2>&1 || true

# candidate PACKAGE:ARCH: prints the version that apt would install.
candidate() { apt-cache "${options[@]}" policy "$1" | sed -n 's/^ *Candidate: //p'; }
# depends PACKAGE PREFIX: prints the packages that a package depends on whose names begin so.
depends() { apt-cache "${options[@]}" depends "$1" | sed -n "s/^ *Depends: \($2[^: ]*\).*/\1/p" | sort -u; }

for suffix in '' -web none; do
  version=$(candidate "rustc$suffix:$native")
  dpkg --compare-versions "${version:-(none)}" ge "$needed" 2>/dev/null && [ "$version" = "$(candidate "libstd-rust$suffix-dev:$foreign")" ] && break
done
[ "$suffix" != none ] || fail "no package has rustc $needed or later with libstd-rust-dev:$foreign (see $folder/apt.log)"
say "fetching rustc$suffix $version with its standard library for $foreign"
library=$(depends "libstd-rust$suffix-dev:$native" libstd-rust)
packages=("rustc$suffix:$native" "libstd-rust$suffix-dev:$native" "libstd-rust$suffix-dev:$foreign" "$library:$native"
  "$(depends "$library:$native" libllvm):$native")
(cd "$work/debs" && apt-get "${options[@]}" download "${packages[@]}" >>"$folder/apt.log" 2>&1) ||
  fail "cannot fetch ${packages[*]} (see $folder/apt.log)"
for package in "$work"/debs/*.deb; do dpkg-deb -x "$package" "$folder/root"; done
cat >"$folder/rustc" <<END
#!/bin/sh
LD_LIBRARY_PATH=$folder/root/usr/lib/$(machine "$native")-linux-gnu\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH} exec $folder/root/usr/bin/rustc "\$@"
END
chmod 0755 "$folder/rustc"
say "$("$folder/rustc" -V)"
echo "$folder/rustc"
