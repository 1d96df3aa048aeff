#!/usr/bin/env bash
# The life of both packages on one machine, run by tests/packages.sh in a system that has the
# packages of two versions in /packages/1 and /packages/2: install, join, request, upgrade under
# load, remove, reinstall, purge. Then the guides for services without packages (units-life.sh).
set -euo pipefail

say() { echo "packages-test: $*"; }
fail() {
  say "$*"
  journalctl --no-pager -o cat -n 30 -u tunnel-server -u tunnel-agent || true
  exit 1
}
trap 'fail "line $LINENO failed: $BASH_COMMAND"' ERR

# eventually COMMAND...: repeats a command until it succeeds, for 60 s.
eventually() {
  for _ in $(seq 300); do
    if "$@" >/dev/null 2>&1; then return 0; fi
    sleep 0.2
  done
  fail "does not succeed: $*"
}
apt() { apt-get -qq -o Dpkg::Use-Pty=0 "$@"; }
request() { curl -fsSN --max-time 90 -H "Host: worker-1:$1" "http://127.0.0.1:10264/$2"; }
pid_of() { systemctl show -p MainPID --value "$1"; }

# Prints the files that packages of ours may leave, without those of the system's own programs.
files() {
  find / -xdev '(' -path /packages -o -path /var/log -o -path /var/cache -o -path /var/lib/apt -o -path /var/lib/dpkg ')' -prune -o -print | sort
}
echo 127.0.0.1 tunnel.example.com >>/etc/hosts
# A person says yes.
echo 'APT::Get::Assume-Yes "true";' >/etc/apt/apt.conf.d/90yes
files >/tmp/before

# install_version VERSION [OPTION...]
install_version() {
  local debs=(/packages/"$1"/*.deb)
  shift
  apt install "$@" "${debs[@]}"
}
printed=$(install_version 1)
for program in tunnel-server tunnel-agent; do
  grep -q "culvert-$program: $program is installed, but not enabled and not started" <<<"$printed" || fail "no message: $printed"
  ! systemctl is-enabled --quiet $program || fail "$program is enabled"
  ! systemctl is-active --quiet $program || fail "$program is active"
  getent passwd $program >/dev/null
  systemctl preset $program 2>/dev/null
  ! systemctl is-enabled --quiet $program || fail "the preset enables $program"
done
systemd-analyze verify --man=no tunnel-server.service tunnel-agent.service
# In tenths: an exposure of 1.8 of 10 at most.
for program in tunnel-server tunnel-agent; do
  systemd-analyze security --offline=yes --threshold=18 --no-pager /lib/systemd/system/$program.service >/tmp/security ||
    fail "$(tail -1 /tmp/security)"
  say "$(tail -1 /tmp/security)"
done
say "installed, neither enabled nor started"

# A target of the node, whose answer ends when /tmp/finish exists.
perl -MIO::Socket::INET -e '
  $SIG{CHLD} = "IGNORE";
  my $listener = IO::Socket::INET->new(LocalAddr => "127.0.0.1:9100", Listen => 5, ReuseAddr => 1) or die;
  while (my $caller = $listener->accept) {
    next if fork;
    while (<$caller>) { last if /^\r\n$/ }
    $caller->autoflush(1);
    print $caller "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n";
    do { print $caller "5\r\nline\n\r\n"; select(undef, undef, undef, 0.2) } until -e "/tmp/finish";
    print $caller "4\r\nend\n\r\n0\r\n\r\n";
    exit;
  }' &

# guide PAGE NUMBER [FOLDER]: runs a block of a page as it stands, from a folder.
guide() {
  local commands
  commands=$(awk -v wanted="$2" '/^ *```sh run systemd$/ { block++; inside = 1; next } /^ *```$/ { inside = 0 } inside && block == wanted' "/packages/$1.md")
  [ -n "$commands" ] || fail "$1 has no block $2"
  (cd "${3:-/packages/1}" && eval "$commands")
}
# An operator's edit.
editor() {
  cat >>"$1" <<END
advertise: ["tunnel.example.com:10262"]
localhostProxyPorts: "9100, 10266"
END
}
printed=$(guide packages 1)
token=${printed##*$'\n'}
guide packages 2 >/dev/null
cat >>/etc/culvert/tunnel-agent.yaml <<END
nodeIp: 127.0.0.1
localhostPorts: "9100, 10266"
END
join() { guide packages 3 <<<"$token"; }
# A server that does not answer, and one with another token: join says why, and the host is as before.
cp /etc/culvert/tunnel-agent.yaml /tmp/agent.yaml
refused() {
  local printed
  ! printed=$(tunnel-agent join --server "$1" --node-name worker-1 2>&1 <<<"$2") || fail "joined: $printed"
  grep -q "$3" <<<"$printed" || fail "join gives no reason: $printed"
  as_before "$printed"
}
# as_before PRINTED: checks that join has undone what it did.
as_before() {
  grep -q 'are as before' <<<"$1" || fail "join does not undo: $1"
  cmp /tmp/agent.yaml /etc/culvert/tunnel-agent.yaml
  [ ! -e /etc/culvert/tunnel-agent.token ] || fail "the token stays"
  ! systemctl is-active --quiet tunnel-agent || fail "the agent runs"
  ! systemctl is-enabled --quiet tunnel-agent || fail "the agent is enabled"
}
refused 127.0.0.1:1 "$token" 'no session within 60 s'
tunnel-server token revoke "$(tunnel-server token create --node worker-1 2>/dev/null | tee /tmp/revoked | cut -d. -f1)"
refused 127.0.0.1:10262 "$(cat /tmp/revoked)" 'not joined: .*token'
# A signal while join waits, as of Ctrl-C or of a terminal that has gone.
for signal in INT HUP; do
  env --default-signal tunnel-agent join --server 127.0.0.1:1 --node-name worker-1 <<<"$token" >/tmp/joining 2>&1 &
  joining=$!
  eventually grep -q 'waiting for a session' /tmp/joining
  kill -$signal $joining
  ! wait $joining || fail "joined: $(cat /tmp/joining)"
  grep -q "not joined: SIG$signal before the agent had a session" /tmp/joining || fail "join says: $(cat /tmp/joining)"
  as_before "$(cat /tmp/joining)"
done
say "refused and interrupted joins are undone"
printed=$(join)
grep -q 'ran systemctl enable --now tunnel-agent' <<<"$printed" || fail "join prints: $printed"
grep -q '^joined: connected to ' <<<"$printed" || fail "join prints: $printed"
tunnel-agent healthcheck >/dev/null || fail "joined without a session"
[ "$(stat -c '%a %U' /etc/culvert/tunnel-agent.token)" = "600 tunnel-agent" ] || fail "the token's mode or owner"
[ ! -e /etc/systemd/system/tunnel-agent.service ] || fail "join writes a unit in addition to that of the package"
tunnel-agent check-config --config /etc/culvert/tunnel-agent.yaml >/dev/null
pid=$(pid_of tunnel-agent)
printed=$(join)
grep -q 'nothing to change' <<<"$printed" || fail "a second join prints: $printed"
[ "$(pid_of tunnel-agent)" = "$pid" ] || fail "a second join restarts the agent"
request 10266 metrics >/tmp/metrics
grep -q ^tunnel_agent_ /tmp/metrics
for program in tunnel-server tunnel-agent; do
  status=/proc/$(pid_of $program)/status
  [ "$(awk '/^Uid:/ { print $2, $3, $4, $5 }' "$status" | tr ' ' '\n' | sort -u)" = "$(id -u $program)" ] || fail "$program: uid"
  grep -q '^CapBnd:	0000000000000000$' "$status" || fail "$program: capabilities"
  [ "$(stat -c '%a %U' /var/lib/$program)" = "700 $program" ] || fail "$program: data directory"
done
# What root creates in the data directory is the service's.
tunnel-server ca client alice -d /tmp/alice >/dev/null
[ "$(stat -c '%a %U' /var/lib/tunnel-server/client-ca.crt)" = "600 tunnel-server" ] || fail "the client CA's owner"
# With a certificate the agent needs no token.
rm /etc/culvert/tunnel-agent.token
systemctl restart tunnel-agent
eventually tunnel-agent healthcheck
say "joined, and a request succeeded"

stops_of() { journalctl -o cat -u "$1" | grep -c ^Stopping || true; }
# stopped_again PROGRAM STOPS: returns whether the service was stopped more often.
stopped_again() { [ "$(stops_of "$1")" -gt "$2" ]; }
# upgrade PROGRAM: upgrades a package while a request runs, which continues for 2 s after SIGTERM.
upgrade() {
  local pid stops slow apt
  pid=$(pid_of "$1") stops=$(stops_of "$1")
  rm -f /tmp/finish
  : >/tmp/slow
  eventually request 10266 metrics
  request 9100 slow >/tmp/slow &
  slow=$!
  eventually test -s /tmp/slow
  if [ "$1" = tunnel-server ]; then guide packages 4 /packages/2; else apt install /packages/2/culvert-"$1"_*.deb; fi >/tmp/printed &
  apt=$!
  eventually stopped_again "$1" "$stops"
  sleep 2
  touch /tmp/finish
  wait $slow || fail "the upgrade of $1 cut a running request after $(wc -l </tmp/slow) lines"
  [ "$(tail -1 /tmp/slow)" = end ] || fail "the answer has no end"
  wait $apt
  ! grep -q 'not enabled' /tmp/printed || fail "the upgrade prints: $(cat /tmp/printed)"
  eventually request 10266 metrics
  [ "$(pid_of "$1")" != "$pid" ] || fail "the upgrade did not restart $1"
  say "$1: upgraded, and the running request was not cut"
}
upgrade tunnel-server
upgrade tunnel-agent
grep -q localhostProxyPorts /etc/culvert/tunnel-server.yaml
systemctl stop tunnel-agent
install_version 1 --allow-downgrades >/dev/null 2>&1
! systemctl is-active --quiet tunnel-agent || fail "a stopped service was started"
eventually tunnel-server healthcheck
systemctl start tunnel-agent
eventually request 10266 metrics
say "downgraded"

cp -a /var/lib/tunnel-server/ca.crt /tmp/ca.crt
apt remove culvert-tunnel-server culvert-tunnel-agent >/dev/null
! pgrep -x 'tunnel-(server|agent)' >/dev/null 2>&1 || fail "a removed service runs"
[ ! -e /usr/bin/tunnel-server ] && [ ! -e /lib/systemd/system/tunnel-server.service ]
grep -q localhostProxyPorts /etc/culvert/tunnel-server.yaml
install_version 2 >/dev/null
! systemctl is-active --quiet tunnel-server || fail "a reinstallation starts the service"
systemctl start tunnel-server tunnel-agent
eventually request 10266 metrics
cmp /var/lib/tunnel-server/ca.crt /tmp/ca.crt
say "removed and reinstalled: configuration, CA and enrollment are the same"

# purge PROGRAM...: purges packages and prints the files that were not there at first.
purge() {
  apt purge culvert-tunnel-server culvert-tunnel-agent
  files >/tmp/after
  comm -13 /tmp/before /tmp/after >/tmp/left
}
printed=$(purge)
grep -q '/var/lib/tunnel-server with its keys is kept' <<<"$printed" || fail "no message: $printed"
left=$(grep -Ev '^/var/lib/tunnel-(server|agent)(/|$)' /tmp/left || true)
[ -z "$left" ] || fail "a purge leaves: $left"
[ -e /var/lib/tunnel-server/ca.key ] && [ -e /var/lib/tunnel-agent/agent.key ]
install_version 2 >/dev/null
[ "$(stat -c %U /var/lib/tunnel-server/ca.key)" = tunnel-server ]
guide packages 5 >/dev/null
[ ! -e /var/lib/tunnel-agent ] && [ -e /var/lib/tunnel-server/ca.key ] || fail "the purge of the guide"
install_version 2 >/dev/null
export CULVERT_PURGE_DATA=yes
purge >/dev/null
[ ! -s /tmp/left ] || fail "a purge leaves: $(cat /tmp/left)"
say "purged: only the data directories stay, and neither with CULVERT_PURGE_DATA=yes"

. /packages/units-life.sh
