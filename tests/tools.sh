#!/usr/bin/env bash
# Brings the real programs that scenarios and the demo run against. What is present is left alone; what cannot be had is
# named, and the tests that need it are skipped.
#
#   curl dig ip ...   installed with apt-get when run as root, else unpacked under target/tools
#   prometheus, node_exporter always unpacked under target/tools, so that no service starts
#   kubectl                   Debian's is always unpacked there too, beside what is installed: the oldest that has to work
#   sshd, sftp-server         unpacked as well: a test starts its own
#   ansible                   of ansible-core: Debian's when run as root, else PyPI's in a venv under target/tools
#   aioquic                   PyPI's, of one version, in that venv; `aioquic-python` there is the Python that has it
set -u
cd "$(dirname "$0")/.." || exit 1
target=${CARGO_TARGET_DIR:-target}
mkdir -p "$target/tools/packages"
tools=$(cd "$target/tools" && pwd)
export PATH=$PATH:/usr/sbin:/sbin DEBIAN_FRONTEND=noninteractive

say() { printf 'tools: %s\n' "$*"; }

have() { command -v "$1" >/dev/null 2>&1 || [ -x "$tools/root/usr/bin/$1" ] || [ -x "$tools/root/usr/sbin/$1" ]; }

# Lists of packages in a folder of our own where the system's are missing and we may not change them.
apt_options=(-q -o Acquire::Retries=2 -o Acquire::http::Timeout=20)
lists_ready=
update_lists() {
  [ -z "$lists_ready" ] || return 0
  lists_ready=yes
  if [ "$(id -u)" -ne 0 ]; then
    mkdir -p "$tools/apt/lists/partial" "$tools/apt/archives/partial"
    apt_options+=(-o "Dir::State::Lists=$tools/apt/lists" -o "Dir::Cache=$tools/apt" -o "Dir::Cache::Archives=$tools/apt/archives")
  fi
  say "reading the lists of packages"
  apt-get "${apt_options[@]}" update >"$tools/apt-update.log" 2>&1
}

# Runs apt-get; when that fails, once more with fresh lists.
apt() { apt-get "${apt_options[@]}" "$@" >>"$tools/apt.log" 2>&1 || { update_lists; apt-get "${apt_options[@]}" "$@" >>"$tools/apt.log" 2>&1; }; }

# unpack PACKAGE...: downloads and unpacks without installing.
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

# want PROGRAM PACKAGE [LIBRARY-PACKAGE...]: the libraries matter only where the package cannot be installed.
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

# Tests use parts of it that it promises nobody.
aioquic=1.7.2
missing=
if ! command -v apt-get >/dev/null 2>&1 || ! command -v dpkg-deb >/dev/null 2>&1; then
  say "no apt-get here: only what is installed already is used"
  exit 0
fi
: >"$tools/apt.log"
want curl curl
want dig bind9-dnsutils bind9-libs libfstrm0 libjemalloc2 libjson-c5 liblmdb0 libmaxminddb0 libnghttp2-14 libprotobuf-c1 libuv1 libxml2
want ip iproute2 libbpf1 libmnl0 libelf1
want nft nftables libnftables1 libnftnl11 libmnl0 libjansson4 libxtables12 libedit2 libbsd0 libmd0 libgmp10
want unshare util-linux
want prlimit util-linux
want ssh openssh-client
want ssh-keygen openssh-client
for package in prometheus prometheus-node-exporter; do
  have "$package" || unpack "$package" || missing="$missing $package"
done
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
[ -z "$missing" ] || say "missing:$missing (no network, or not allowed; see target/tools/apt.log)"
exit 0
