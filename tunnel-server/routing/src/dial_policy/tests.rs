use super::*;

fn listed(texts: &[&str]) -> DialPolicy {
    let targets = texts.iter().map(|text| text.parse().unwrap()).collect();
    DialPolicy::Listed(targets, LiveClusterNetworks::default())
}

fn check(dial_policy: &DialPolicy, address: &str) -> &'static str {
    let routes = RouteTable::default();
    check_with(dial_policy, address, &AddressClaims::none(&routes))
}

#[track_caller]
fn check_all(dial_policy: &DialPolicy, claims: &AddressClaims<'_>, rows: &[(&str, &str)]) {
    for (address, expected) in rows {
        let result = check_with(dial_policy, address, claims);
        assert_eq!(result, *expected, "{address}");
    }
}

fn check_with(dial_policy: &DialPolicy, address: &str, claims: &AddressClaims<'_>) -> &'static str {
    match dial_policy.check(address.parse().unwrap(), claims) {
        Ok(_) => "dialed",
        Err(DialRefusal::Never(..)) => "never",
        Err(DialRefusal::NotListed(_)) => "not listed",
        Err(DialRefusal::Agent(..)) => "agent",
        Err(DialRefusal::Conflicting(_)) => "contested",
        Err(DialRefusal::Own(_)) => "own",
    }
}

/// Sets the networks of a cluster with one node. Returns its routes.
fn set_networks(ranges: &LiveClusterNetworks, own: &[IpAddr]) -> RouteTable {
    let cloud: NodeName = "cloud-1".parse().unwrap();
    let addresses = ["10.0.0.9".parse().unwrap()];
    let pods = vec!["10.244.1.0/24".parse().unwrap()];
    let mut networks = ClusterNetworks {
        services: vec!["10.96.0.0/12".parse().unwrap()],
        own: own.to_vec(),
        ..ClusterNetworks::default()
    };
    networks.set_node(&cloud, pods, Some(addresses.to_vec()));
    ranges.set(networks);
    RouteTable::new([(&cloud, &addresses[..])])
}

/// T05: the addresses that are never dialed even if every network is listed, and the addresses that
/// a narrow list allows.
#[test]
fn t05_table_of_addresses_that_are_never_dialed_directly() {
    let all = listed(&["0.0.0.0/0", "::/0"]);
    let never = "169.254.0.1 169.254.169.254 169.254.170.2 169.254.255.255 100.100.100.200 \
                 192.0.0.192 168.63.129.16 0.0.0.0 0.1.2.3 224.0.0.1 239.255.255.255 \
                 255.255.255.255 [::] [fe80::1] [febf:ffff::1] [ff02::1] [fd00:ec2::254] \
                 [fd00:ec2::23] [fd20:ce::254] [::ffff:169.254.169.254] [::ffff:100.100.100.200] \
                 [::ffff:0.0.0.0] [::ffff:224.0.0.1] [64:ff9b::169.254.169.254] \
                 [64:ff9b::a83f:8110] [64:ff9b::127.0.0.1] [64:ff9b::10.0.0.5]";
    for ip in never.split(' ') {
        for port in [80, 443, 2379, 10250] {
            assert_eq!(check(&all, &format!("{ip}:{port}")), "never", "{ip}:{port}");
        }
    }
    for ip in ["127.0.0.1", "127.8.8.8", "[::1]", "[::ffff:127.0.0.1]"] {
        assert_eq!(check(&all, &format!("{ip}:10265")), "not listed", "{ip}");
    }
    for ip in ["10.0.0.5", "8.8.8.8", "[2001:db8::1]", "[::ffff:10.0.0.5]"] {
        assert_eq!(check(&all, &format!("{ip}:443")), "dialed", "{ip}");
    }
    assert_eq!(check(&all, "10.0.0.5:0"), "not listed");
    let narrow = listed(&["10.96.0.0/12:443", "[fd00::/8]:443-444", "127.0.0.0/8:8443"]);
    for (address, expected) in [
        ("10.96.0.10:443", "dialed"),
        ("10.96.0.10:80", "not listed"),
        ("10.112.0.1:443", "not listed"),
        ("[fd00::1]:444", "dialed"),
        ("[fd00::1]:445", "not listed"),
        ("127.0.0.1:8443", "dialed"),
        ("127.0.0.1:8444", "not listed"),
    ] {
        assert_eq!(check(&narrow, address), expected, "{address}");
    }
}

#[test]
fn checked_address_is_the_dialed_address() {
    let all = listed(&["10.0.0.0/8"]);
    let routes = RouteTable::default();
    let address = "[::ffff:10.0.0.5]:443".parse().unwrap();
    let judged = all.check(address, &AddressClaims::none(&routes));
    assert_eq!(judged, Ok("10.0.0.5:443".parse().unwrap()));
}

#[test]
fn nothing_is_allowed_before_the_cluster_networks_are_known() {
    let ranges = LiveClusterNetworks::default();
    let dial_policy = DialPolicy::Cluster(ranges.clone());
    assert!(dial_policy.is_deny_all());
    assert_eq!(check(&dial_policy, "10.96.0.1:443"), "not listed");
    let routes = set_networks(&ranges, &[]);
    let claims = AddressClaims::none(&routes);
    let rows = [
        ("10.96.0.1:443", "dialed"),
        ("10.244.1.7:8443", "dialed"),
        ("10.244.2.7:8443", "not listed"),
        ("10.0.0.9:10250", "dialed"),
        ("10.0.0.9:2379", "not listed"),
        ("10.0.0.10:10250", "not listed"),
    ];
    check_all(&dial_policy, &claims, &rows);
    assert!(listed(&[]).is_deny_all() && !listed(&["10.0.0.0/8"]).is_deny_all());
}

#[test]
fn networks_never_contain_this_server_and_its_ports_are_never_dialed() {
    let ranges = LiveClusterNetworks::default();
    let routes = set_networks(&ranges, &["10.96.0.7".parse().unwrap()]);
    let own_ports = [Port::new(10264).unwrap()];
    let own: [IpAddr; 2] = ["10.244.1.5", "10.0.0.9"].map(|ip| ip.parse().unwrap());
    let claims = AddressClaims {
        is_own: &|ip| own.contains(&ip),
        own_ports: &own_ports,
        ..AddressClaims::none(&routes)
    };
    let dial_policy = DialPolicy::Cluster(ranges.clone());
    let rows = [
        ("10.244.1.5:8443", "own"),
        ("[::ffff:10.244.1.5]:8443", "own"),
        ("10.244.1.6:8443", "dialed"),
        ("10.96.0.7:10250", "own"),
        ("10.96.0.8:10250", "dialed"),
        // The server shares the address of its host.
        ("10.0.0.9:10250", "dialed"),
        ("10.0.0.9:10264", "own"),
    ];
    check_all(&dial_policy, &claims, &rows);
    let listed = |texts: &[&str]| {
        let targets = texts.iter().map(|text| text.parse().unwrap()).collect();
        DialPolicy::Listed(targets, ranges.clone())
    };
    let rows = [
        ("10.244.1.5:8443", "dialed"),
        ("10.244.1.5:10264", "own"),
        // The Service of the server leads to its ports under any number.
        ("10.96.0.7:443", "own"),
        ("[::ffff:10.96.0.7]:10264", "own"),
        ("10.96.0.8:443", "dialed"),
    ];
    check_all(&listed(&["10.0.0.0/8"]), &claims, &rows);
    check_all(
        &listed(&["10.96.0.7"]),
        &claims,
        &[("10.96.0.7:443", "own")],
    );
    let rows = [("10.96.0.7:443", "dialed"), ("10.96.0.7:444", "own")];
    check_all(&listed(&["10.0.0.0/8", "10.96.0.7:443"]), &claims, &rows);
}

/// A network of `--connect-direct` may contain an address of this host.
#[test]
fn own_ports_are_dialed_only_if_the_operator_lists_address_and_port() {
    let own_ports = [10262, 10265].map(|port| Port::new(port).unwrap());
    let own: IpAddr = "10.0.0.5".parse().unwrap();
    let routes = RouteTable::default();
    let claims = AddressClaims {
        is_own: &|ip| ip == own || ip.is_loopback(),
        own_ports: &own_ports,
        ..AddressClaims::none(&routes)
    };
    let networks = ["10.0.0.0/8", "127.0.0.0/8", "10.0.0.5"];
    let rows = [
        ("10.0.0.5:10262", "own"),
        ("[::ffff:10.0.0.5]:10262", "own"),
        ("127.0.0.1:10265", "own"),
        ("10.0.0.5:443", "dialed"),
        ("10.0.0.6:10262", "dialed"),
    ];
    check_all(&listed(&networks), &claims, &rows);
    let rows = [("10.0.0.5:10265", "dialed"), ("10.0.0.5:10262", "own")];
    check_all(&listed(&["10.0.0.0/8", "10.0.0.5:10265"]), &claims, &rows);
}
