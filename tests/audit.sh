#!/usr/bin/env bash
# Checks the dependencies: licenses, banned crates, sources and advisories (deny.toml), and
# dependencies that no code uses. The two tools are installed from the crate registry under
# target/tools. A check whose tool or database cannot be fetched is skipped with a notice.
set -u
cd "$(dirname "$0")/.." || exit 1
. tests/target.sh
mkdir -p "$target/tools"
tools=$(cd "$target/tools" && pwd)

say() { printf 'audit: %s\n' "$*"; }

# has CRATE VERSION: installs the program of a crate if it is absent.
has() {
  grep -qs "\"$1 $2 " "$tools/.crates.toml" && return 0
  say "installing $1 $2"
  cargo install --quiet --locked --root "$tools" --version "$2" "$1" >"$tools/$1.log" 2>&1 && return 0
  say "skipped: cannot install $1 $2 (no network? see $tools/$1.log)"
  return 1
}

result=0
if has cargo-deny 0.20.2; then
  "$tools/bin/cargo-deny" check bans licenses sources || result=1
  if timeout 120 "$tools/bin/cargo-deny" fetch db >"$tools/advisories.log" 2>&1; then
    "$tools/bin/cargo-deny" check --disable-fetch advisories || result=1
  else
    say "skipped: cannot fetch the database of advisories (see $tools/advisories.log)"
  fi
fi
if has cargo-machete 0.9.1; then
  "$tools/bin/cargo-machete" || result=1
fi
exit "$result"
