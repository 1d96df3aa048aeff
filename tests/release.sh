#!/usr/bin/env bash
# Tests deploy/release.sh in clones of this repository in which .ci/run builds nothing: each check
# refuses and changes nothing, and a release has its commit, tag and changelog.
#
#   tests/release.sh
set -euo pipefail
cd "$(dirname "$0")/.."
# Without the settings and the repository of a caller, as in a hook of git.
unset GIT_DIR GIT_INDEX_FILE GIT_WORK_TREE
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null RELEASE_DATE=2026-01-31
export GIT_AUTHOR_NAME=test GIT_AUTHOR_EMAIL=test@culvert.example GIT_COMMITTER_NAME=test GIT_COMMITTER_EMAIL=test@culvert.example

say() { echo "release-test: $*"; }
fail() { say "$*"; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
version=9.8.7

# The files that a release reads, with this tree's content, in a repository of their own.
mkdir -p "$work/origin"/{deploy/chart,.ci}
cp deploy/release.sh deploy/version.sh "$work/origin/deploy/"
sed "s/^\(version\|appVersion\): .*/\1: $version/" deploy/chart/Chart.yaml >"$work/origin/deploy/chart/Chart.yaml"
sed "/^\[workspace.package\]/,/^\[/ s/^version = .*/version = \"$version\"/" Cargo.toml >"$work/origin/Cargo.toml"
sed "/^name = \"tunnel-[a-z]*\"\$/ { n; s/.*/version = \"$version\"/ }" Cargo.lock >"$work/origin/Cargo.lock"
awk '/^## / { seen++ } seen < 2' CHANGELOG.md >"$work/origin/CHANGELOG.md"
printf '#!/bin/sh\necho ran >../ran\n' >"$work/origin/.ci/run"
chmod +x "$work/origin/.ci/run"
grep -q '^- ' "$work/origin/CHANGELOG.md" || printf '\n### Fixed\n\n- An entry.\n' >>"$work/origin/CHANGELOG.md"
git -C "$work/origin" init --quiet --initial-branch=main
git -C "$work/origin" add -A
git -C "$work/origin" commit --quiet -m 'all of it'

# clone: makes a clone in $work/clone.
clone() {
  rm -rf "$work/clone" "$work/ran"
  git clone --quiet "$work/origin" "$work/clone"
}
state() { git -C "$work/clone" for-each-ref; git -C "$work/clone" status --porcelain; sha256sum "$work/clone/CHANGELOG.md"; }

# refuses REASON COMMAND [ARGUMENT...]: changes a new clone with a command that runs in it. Then a
# release is refused for the reason, and changes nothing.
refuses() {
  local reason=$1 before printed
  shift
  clone
  (cd "$work/clone" && "$@")
  before=$(state)
  if printed=$(cd "$work/clone" && deploy/release.sh "${asked:-$version}" 2>&1); then fail "accepted with: $*"; fi
  grep -qF "$reason" <<<"$printed" || fail "expected '$reason' after '$*', got: $printed"
  [ "$(state)" = "$before" ] || fail "a refused release changes the clone after: $*"
}
# committed FILE SED: edits a file and commits it.
committed() { sed -i "$2" "$1" && git commit --quiet -am edited; }

asked=9.8 refuses "is not MAJOR.MINOR.PATCH" true
asked=v9.8.7 refuses "is not MAJOR.MINOR.PATCH" true
asked=9.8.8 refuses "Cargo.toml is of version '9.8.7'" true
refuses "Cargo.toml is of version '9.8.6'" committed Cargo.toml 's/^version = "9.8.7"/version = "9.8.6"/'
refuses "Cargo.lock (tunnel-agent)" committed Cargo.lock '/^name = "tunnel-agent"/ { n; s/.*/version = "9.8.6"/ }'
refuses "Chart.yaml (version)" committed deploy/chart/Chart.yaml 's/^version: .*/version: 9.8.6/'
refuses "Chart.yaml (appVersion)" committed deploy/chart/Chart.yaml 's/^appVersion: .*/appVersion: 9.8.6/'
refuses "no section [Unreleased]" committed CHANGELOG.md 's/^## \[Unreleased\]/## [unreleased]/'
refuses "no entries below [Unreleased]" committed CHANGELOG.md '/^- /d'
refuses "already has a section of $version" committed CHANGELOG.md "\$a ## [$version] - 2026-01-01"
refuses "changes that no commit has" sed -i '$a edited' Cargo.toml
refuses "changes that no commit has" touch new-file
refuses "the tag v$version exists" git tag "v$version"
refuses "no branch is checked out" git checkout --quiet --detach
[ ! -e "$work/ran" ] || fail ".ci/run ran before the checks"
refuses ".ci/run failed" committed .ci/run 's/^echo.*/exit 3/'
clone
(cd "$work/clone" && committed .ci/run 's/^echo.*/touch left-behind/')
before=$(git -C "$work/clone" for-each-ref; sha256sum "$work/clone/CHANGELOG.md")
if (cd "$work/clone" && deploy/release.sh $version >"$work/printed" 2>&1); then fail "accepted although .ci/run writes files"; fi
grep -qF ".ci/run changed files" "$work/printed" || fail "got: $(cat "$work/printed")"
[ "$before" = "$(git -C "$work/clone" for-each-ref; sha256sum "$work/clone/CHANGELOG.md")" ] || fail "a refused release made a commit"
say "16 mistakes are refused and change nothing"

clone
before=$(state)
printed=$(cd "$work/clone" && deploy/release.sh $version --dry-run)
grep -qF "[$version] - 2026-01-31" <<<"$printed" || fail "a dry run prints: $printed"
[ "$(state)" = "$before" ] && [ ! -e "$work/ran" ] || fail "a dry run changes the clone, or runs .ci/run"
say "a dry run changes nothing"

printed=$(cd "$work/clone" && deploy/release.sh $version)
cd "$work/clone"
[ -e "$work/ran" ] || fail ".ci/run did not run"
[ -z "$(git status --porcelain)" ] || fail "the clone is not clean after a release"
[ "$(git cat-file -t v$version)" = tag ] || fail "the tag is not annotated"
[ "$(git rev-parse "v$version^{commit}")" = "$(git rev-parse HEAD)" ] || fail "the tag is not at HEAD"
[ "$(git rev-parse HEAD~)" = "$(git rev-parse origin/main)" ] || fail "a release is not one commit"
[ "$(git diff --name-only HEAD~ HEAD)" = CHANGELOG.md ] || fail "a release changes other files"
grep -q '^### ' <<<"$(git tag --list --format='%(contents)' v$version)" || fail "the tag has no changes"
grep -q "^## \[$version\] - 2026-01-31$" <<<"$(grep -A2 '^## \[Unreleased\]$' CHANGELOG.md)" || fail "the section has no date"
grep -qF "git push --atomic REMOTE main v$version" <<<"$printed" || fail "a release prints: $printed"
(. deploy/version.sh && [ "$label" = $version ]) || fail "the artifacts at the tag are of another version"
say "a release is one commit with its changelog, and an annotated tag"
