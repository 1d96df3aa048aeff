#!/usr/bin/env bash
# Builds the two binaries without shared libraries, for images FROM scratch and for machines of any
# distribution. The binaries are in $CARGO_TARGET_DIR/static/TRIPLE/dist, separate from other
# builds, whose artifacts different flags would invalidate.
#
#   deploy/static.sh [TRIPLE]     for this machine by default; prints the folder
set -euo pipefail
cd "$(dirname "$0")/.."
triple=${1:-$(rustc -vV | sed -n 's/^host: //p')}
folder=${CARGO_TARGET_DIR:-target}/static

# Without the second flag, getrandom looks up its system call in shared libraries, does not find it,
# and needs /dev/urandom.
export RUSTFLAGS='-C target-feature=+crt-static --cfg getrandom_backend="linux_getrandom"'
# `tunnel_build_info` shows the commit. Sources without git set the variable, or show none.
if [ -z "${CULVERT_COMMIT:-}" ] && commit=$(git rev-parse --short=12 HEAD 2>/dev/null); then
  export CULVERT_COMMIT=$commit
fi
# With an explicit target, these flags do not apply to build scripts and macros, which must be
# dynamic.
cargo build --locked --profile dist --target "$triple" --target-dir "$folder" -p tunnel-server -p tunnel-agent --bins >&2
echo "$folder/$triple/dist"
