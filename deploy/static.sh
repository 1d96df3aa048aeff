#!/usr/bin/env bash
# Builds the two binaries without any shared library, for images FROM scratch and for machines of any distribution. They come
# to $CARGO_TARGET_DIR/static/TRIPLE/dist, apart from the other builds, which other flags would throw away.
#
#   deploy/static.sh [TRIPLE]     the host's unless given; prints the folder
set -euo pipefail
cd "$(dirname "$0")/.."
triple=${1:-$(rustc -vV | sed -n 's/^host: //p')}
folder=${CARGO_TARGET_DIR:-target}/static

# Without the second flag, getrandom looks its system call up among shared libraries, finds none, and needs /dev/urandom.
export RUSTFLAGS='-C target-feature=+crt-static --cfg getrandom_backend="linux_getrandom"'
# The explicit target keeps these flags from build scripts and macros, which have to be dynamic.
cargo build --locked --profile dist --target "$triple" --target-dir "$folder" -p tunnel-server -p tunnel-agent --bins >&2
echo "$folder/$triple/dist"
