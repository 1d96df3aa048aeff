# Sourced: sets `target` to the build's folder. Creates it as cargo does: cargo marks only a folder
# that it creates itself, and the tests find the folder by the mark.
target=${CARGO_TARGET_DIR:-target}
mkdir -p "$target"
[ -e "$target/CACHEDIR.TAG" ] ||
  printf 'Signature: 8a477f597d28d172789f06886806bc55\n# A folder of build results, see https://bford.info/cachedir/\n' >"$target/CACHEDIR.TAG"
