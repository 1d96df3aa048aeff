#!/usr/bin/env bash
# Builds the image localhost/culvert/tools:local for compose.yaml FROM scratch: Prometheus,
# node_exporter, ip and a shell from Debian's packages, with the libraries that they need. The
# script needs a Debian host with apt-get, and docker or podman.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
mkdir -p "$root" "$work/packages"

engine=${ENGINE:-}
if [ -z "$engine" ]; then
  if command -v docker >/dev/null && docker version >/dev/null 2>&1; then engine=docker
  elif command -v podman >/dev/null; then engine=podman
  else echo "tools: needs docker (with its daemon running) or podman" >&2; exit 1; fi
fi

(
  cd "$work/packages"
  apt-get -q download prometheus prometheus-node-exporter iproute2 dash libbpf1 libelf1 libmnl0 zlib1g libcap2 libtirpc3 \
    libgssapi-krb5-2 libkrb5-3 libk5crypto3 libkrb5support0 libcom-err2 libkeyutils1 libc6 >/dev/null
  for package in *.deb; do dpkg-deb -x "$package" "$work/all"; done
)
# Copies only the four programs, and then the libraries that they are linked with.
for program in usr/bin/prometheus usr/bin/prometheus-node-exporter bin/ip bin/dash; do
  file=$work/all/$program
  [ -e "$file" ] || file=$work/all/usr/$program
  install -D -m 0755 "$file" "$root/bin/$(basename "$program")"
done
mv "$root/bin/dash" "$root/bin/sh"
libraries=$(find "$work/all" -type d -path '*lib/*-linux-gnu' -printf '%p:')
for program in "$root"/bin/*; do
  LD_LIBRARY_PATH=$libraries ldd "$program" 2>/dev/null | awk '$3 ~ /^\// { print $1, $3 } $1 ~ /^\// { print $1, $1 }' |
    while read -r name file; do
      case $name in
        /*) install -D -m 0755 "$file" "$root$name" ;;
        *) install -D -m 0755 "$file" "$root/lib/$name" ;;
      esac
    done || true
done
mkdir -p "$root/data" "$root/tmp"
cat >"$work/Dockerfile" <<'END'
FROM scratch
COPY root/ /
ENV LD_LIBRARY_PATH=/lib PATH=/bin
END
"$engine" build -q -t localhost/culvert/tools:local "$work" >/dev/null
echo "tools: made localhost/culvert/tools:local with $engine"
