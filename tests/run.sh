#!/usr/bin/env bash
# Runs the tests of a gear, and lists those that were skipped: tests/run.sh [GEAR [ARGUMENT...]]
#
#   check     tests that end within 5 s and need no root
#   test      all tests, the default
#   test-all  all tests in the full gear, those of benchmark and demo, too
#
# The arguments go to the test runner.
set -u
cd "$(dirname "$0")/.." || exit 1
gear=${1:-test}
shift $(($# > 0))
packages=() ignored=()
case $gear in
  check) profile=check ;;
  test) profile=default ;;
  test-all)
    profile=full packages=(--workspace) ignored=(--run-ignored all)
    export CULVERT_TEST_GEAR=full
    ;;
  *)
    echo "$gear: expected check, test or test-all"
    exit 64
    ;;
esac
. tests/target.sh
skips=$target/test-skips
rm -rf "$skips"
# Many tests wait for timers, so one more than the processors.
export NEXTEST_TEST_THREADS=${NEXTEST_TEST_THREADS:-$(($(nproc) + 1))}

# The scenarios run the binaries as processes. Build the binaries first, so that they match this
# tree.
cargo build "${packages[@]}" --bins || exit 1
result=0
if [ "$gear" != check ] && [ $# -eq 0 ]; then
  cargo test --doc --quiet || result=1
fi
if cargo nextest --version >/dev/null 2>&1; then
  cargo nextest run --profile "$profile" "${packages[@]}" "${ignored[@]}" "$@" || result=1
else
  echo "cargo-nextest is not installed; cargo test runs all tests instead, one at a time and without time limits"
  cargo test "${packages[@]}" --lib --bins --tests -- --test-threads=1 ${ignored:+--include-ignored} || result=1
fi

if [ -d "$skips" ]; then
  echo "$(find "$skips" -type f | wc -l) tests were skipped:"
  sort "$skips"/*
else
  echo "no test was skipped"
fi
exit "$result"
