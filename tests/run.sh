#!/usr/bin/env bash
# Builds the binaries, runs all tests, and lists those that were skipped. Arguments go to the test runner.
set -u
cd "$(dirname "$0")/.." || exit 1
skips=${CARGO_TARGET_DIR:-target}/test-skips
rm -rf "$skips"

# The scenarios run the binaries as processes. Build the binaries first, so that they match this
# tree.
cargo build --bins || exit 1
result=0
if [ $# -eq 0 ]; then
  cargo test --doc --quiet || result=1
fi
if cargo nextest --version >/dev/null 2>&1; then
  cargo nextest run "$@" || result=1
else
  echo "cargo-nextest is not installed; cargo test runs the tests instead, one at a time and without time limits"
  cargo test --lib --bins --tests "$@" -- --test-threads=1 || result=1
fi

if [ -d "$skips" ]; then
  echo "$(find "$skips" -type f | wc -l) tests were skipped:"
  sort "$skips"/*
else
  echo "no test was skipped"
fi
exit "$result"
