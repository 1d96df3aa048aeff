#!/usr/bin/env bash
# Builds the two binaries without shared libraries, for images FROM scratch and for machines of any
# distribution. The binaries are in $CARGO_TARGET_DIR/static/TRIPLE/dist, separate from other
# builds, whose artifacts different flags would invalidate.
#
#   deploy/static.sh [TRIPLE]     for this machine by default; prints the folder
#   RUSTC=FILE                    another compiler than that of rust-toolchain.toml
#
# Exits with 77 where a compiler or a library is missing.
#
# TRIPLE=aarch64-unknown-linux-gnu needs the cross compiler of Debian, and the standard library for
# it: `rustup target add aarch64-unknown-linux-gnu`, or a compiler of Debian that has it,
# RUSTC=$(deploy/debian-rust.sh arm64). Both compile the C code of AWS-LC and jemalloc with gcc and
# link glibc, as for amd64; Zig cannot link glibc statically.
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/version.sh

missing() { printf 'static: %s\n' "$*" >&2; exit 77; }

host=$(rustc -vV | sed -n 's/^host: //p')
triple=${1:-$host}
machine=${triple%%-*}
folder=${CARGO_TARGET_DIR:-target}/static

if [ "$triple" != "$host" ]; then
  linker=$machine-linux-gnu-gcc
  debian=$(sed 's/x86_64/amd64/; s/aarch64/arm64/' <<<"$machine")
  command -v "$linker" >/dev/null && [ -f "$("$linker" -print-file-name=libc.a)" ] ||
    missing "needs $linker and its libc.a; on Debian: apt-get install crossbuild-essential-$debian"
  variable=CARGO_TARGET_${triple//-/_}_LINKER
  export "${variable^^}=$linker"
fi
[ -d "$("${RUSTC:-rustc}" --print sysroot)/lib/rustlib/$triple/lib" ] ||
  missing "${RUSTC:-rustc} has no standard library for $triple: rustup target add $triple, or RUSTC=\$(deploy/debian-rust.sh arm64)"
# jemalloc ends a process whose kernel has larger pages than it was built for. arm64 has pages of 4, 16
# or 64 KiB.
if [ "$machine" = aarch64 ]; then export JEMALLOC_SYS_WITH_LG_PAGE=16; fi

# Without the second flag, getrandom looks up its system call in shared libraries, does not find it,
# and needs /dev/urandom.
export RUSTFLAGS='-C target-feature=+crt-static --cfg getrandom_backend="linux_getrandom"'
# `tunnel_build_info` shows the commit. Sources without git set the variable, or show none.
if [ -n "$commit" ]; then export CULVERT_COMMIT=$commit; fi
# With an explicit target, these flags do not apply to build scripts and macros, which must be
# dynamic.
cargo build --locked --profile dist --target "$triple" --target-dir "$folder" -p tunnel-server -p tunnel-agent --bins >&2
echo "$folder/$triple/dist"
