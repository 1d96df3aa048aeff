#!/usr/bin/env bash
# Makes the commit and the tag of a release, after all checks have passed. Pushes nothing.
#
#   deploy/release.sh VERSION [--dry-run]
#
# The checks: the clone is clean and has no tag of VERSION; Cargo.toml, Cargo.lock and the chart are of
# VERSION; CHANGELOG.md has entries below [Unreleased] and no section of VERSION yet. Then the section
# gets version and date, and .ci/run has to pass. A failure leaves the clone as it was. --dry-run makes
# the checks other than .ci/run, and changes nothing.
#
#   RELEASE_DATE=2026-01-31    today (UTC) by default
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'release: %s\n' "$*"; }
fail() { say "$*" >&2; exit 1; }

[ $# -ge 1 ] && [ $# -le 2 ] || fail "usage: deploy/release.sh VERSION [--dry-run]"
wanted=$1
dry_run=
case ${2-} in
  '') ;;
  --dry-run) dry_run=yes ;;
  *) fail "$2: expected --dry-run" ;;
esac
date=${RELEASE_DATE:-$(date --utc +%F)}
number='(0|[1-9][0-9]*)'
[[ $wanted =~ ^$number\.$number\.$number$ ]] || fail "VERSION=$wanted is not MAJOR.MINOR.PATCH"
[[ $date =~ ^[0-9]{4}-[0-9]{2}-[0-9]{2}$ ]] || fail "RELEASE_DATE=$date is not YYYY-MM-DD"

. deploy/version.sh
# is_of FILE VERSION: fails if a file is of another version.
is_of() { [ "$2" = "$wanted" ] || fail "$1 is of version '$2', not $wanted"; }
is_of Cargo.toml "$version"
for crate in $(sed -n 's/^name = "\(tunnel-[a-z]*\)"$/\1/p' Cargo.lock); do
  is_of "Cargo.lock ($crate)" "$(sed -n "/^name = \"$crate\"\$/ { n; s/^version = \"\(.*\)\"/\1/p }" Cargo.lock)"
done
for field in version appVersion; do
  is_of "deploy/chart/Chart.yaml ($field)" "$(sed -n "s/^$field: //p" deploy/chart/Chart.yaml)"
done

# section: prints the entries below [Unreleased].
section() { awk '/^## / { inside = /^## \[Unreleased\]$/; next } inside' CHANGELOG.md; }
[ "$(grep -c '^## \[Unreleased\]$' CHANGELOG.md)" -eq 1 ] || fail "CHANGELOG.md has no section [Unreleased], or several"
entries=$(section | grep -c '^- ') || fail "CHANGELOG.md has no entries below [Unreleased]"
! grep -qF "## [$wanted]" CHANGELOG.md || fail "CHANGELOG.md already has a section of $wanted"
[ -z "$(git status --porcelain)" ] || fail "the clone has changes that no commit has: $(git status --porcelain | head -3 | tr '\n' ';')"
! git rev-parse --quiet --verify "refs/tags/v$wanted" >/dev/null || fail "the tag v$wanted exists"
branch=$(git symbolic-ref --quiet --short HEAD) || fail "no branch is checked out"

if [ -n "$dry_run" ]; then
  say "would date the section of CHANGELOG.md ($entries entries): [$wanted] - $date"
  say "would run .ci/run, commit to $branch, and make the tag v$wanted"
  exit 0
fi

notes=$(mktemp)
undo() { git checkout --quiet HEAD -- CHANGELOG.md; rm -f "$notes"; }
trap undo EXIT
{ echo "Culvert $wanted"; echo; section; } >"$notes"
sed -i "s/^## \[Unreleased\]\$/&\n\n## [$wanted] - $date/" CHANGELOG.md
say "running .ci/run"
# Without the variables of `make release`, which its own calls of make would take for theirs.
env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL -u VERSION -u ARGS .ci/run || fail ".ci/run failed; nothing is changed"
[ "$(git status --porcelain)" = " M CHANGELOG.md" ] || fail ".ci/run changed files: $(git status --porcelain | head -3 | tr '\n' ';')"
git commit --quiet --message "release: $wanted" -- CHANGELOG.md
# Lines of a section begin with #, which would be comments.
git tag --annotate --cleanup=verbatim --file "$notes" "v$wanted"
say "made $(git rev-parse --short HEAD) on $branch and the tag v$wanted; to publish them:"
say "  git push --atomic REMOTE $branch v$wanted"
say "  VERSION=$wanted make dist dist-test     # at this commit"
