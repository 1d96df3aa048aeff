# The guides for services without packages, after packages-life.sh and with its functions: systemd, upgrade, the
# units that `render` prints, and the package that replaces units. /clone has the files of a clone that they name.

# As for root on Debian. The assignment makes bash forget where the packages' programs were.
PATH=/usr/local/sbin:/usr/local/bin:$PATH
printed=$(guide systemd 1 /clone)
token=${printed##*$'\n'}
guide systemd 2 /clone
printed=$(guide systemd 3 /clone <<<"$token")
grep -q '^joined: connected to ' <<<"$printed" || fail "join prints: $printed"
eventually request 10266 metrics
say "units: a server, and a node that joined"

systemctl disable --quiet --now tunnel-agent
rm -r /etc/culvert/tunnel-agent.* /etc/systemd/system/tunnel-agent.service /var/lib/tunnel-agent
tunnel-server token create --node worker-1 >/clone/token 2>/dev/null
guide systemd 4 /clone
eventually request 10266 metrics
pid=$(pid_of tunnel-server)
guide upgrade 1 /clone >/dev/null
[ "$(pid_of tunnel-server)" != "$pid" ] || fail "the upgrade did not restart the server"
eventually request 10266 metrics
say "units: a node set up by hand, and a server that was upgraded"

# rendered PAGE FILE: runs the command of a page that writes the file.
rendered() { (cd /clone && eval "$(grep "> $2\$" "/packages/$1.md")"); }
rendered node-local-dns culvert-node-dns.service
guide node-local-dns 1 /clone
ip address show dev lo | grep -q 169.254.20.11 || fail "the address for names"
rendered edge-apiserver edge-apiserver.nft
rendered edge-apiserver culvert-edge-apiserver.service
guide edge-apiserver 1 /clone
rules=$(nft list table ip culvert_edge_apiserver)
grep -q 169.254.2.1:10268 <<<"$rules" || fail "the rules for pods: $rules"
guide edge-apiserver 2 /clone
! nft list table ip culvert_edge_apiserver 2>/dev/null || fail "the rules stay"
! ip address show dev lo | grep -q 169.254.2.1 || fail "the address stays"
say "units: addresses and rules for pods come and go"

# A person keeps the configuration, which is the default.
echo 'Dpkg::Options { "--force-confold"; };' >/etc/apt/apt.conf.d/91keep
guide packages 6 >/dev/null
systemctl show -p ExecStart tunnel-server | grep -q /usr/bin/tunnel-server || fail "the unit of the package is not in use"
eventually request 10266 metrics
say "units: replaced by the package"
