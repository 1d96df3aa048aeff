# Sourced by the scripts that build artifacts, in the root of the repository: says which version and
# commit they are of, once for all of them.
#
#   version              of Cargo.toml
#   commit               of the sources; CULVERT_COMMIT where there is no git
#   label                $version at the tag v$version; $version~TIME.COMMIT, which is lower, elsewhere
#   SOURCE_DATE_EPOCH    time of the commit
version=$(sed -n '/^\[workspace.package\]/,/^\[/ s/^version = "\(.*\)"/\1/p' Cargo.toml)
commit=${CULVERT_COMMIT:-$(git rev-parse --short=12 HEAD 2>/dev/null || true)}
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || true)}
export SOURCE_DATE_EPOCH

# commit_time ARGUMENT...: prints the time of the commit.
commit_time() { TZ=UTC date --utc --date="@$SOURCE_DATE_EPOCH" "$@"; }

# is_release: returns whether the sources are those of the tag of their version.
is_release() { [ "$(git describe --tags --exact-match --match "v$version" 2>/dev/null)" = "v$version" ]; }

label=$version
if [ -n "$SOURCE_DATE_EPOCH" ] && ! is_release; then
  label=$version~$(commit_time +%Y%m%d%H%M%S).${commit:0:8}
fi
