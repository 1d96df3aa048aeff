//! Names and addresses, configuration files, and the files of the data directory.

use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};
use tunnel_agent::config::{HttpProxy, ServerAddress};
use tunnel_process::networks::Cidr;
use tunnel_process::settings::{parse_address, parse_duration, parse_size};
use tunnel_process::yaml;
use tunnel_proto::wire::enroll::decode_hex;
use tunnel_proto::wire::name::{NodeName, Port};
use tunnel_proto::wire::name_pattern::NamePattern;
use tunnel_proto::wire::ports::PortSet;
use tunnel_routing::dial_policy::DirectTarget;
use tunnel_server::ingress::connect::basic_auth::BasicAuthUsers;
use tunnel_store::data_dir::DataDir;

use crate::process::ScratchDir;

pub(super) fn names() -> Result<Vec<Vec<u8>>> {
    Ok([
        "worker-1",
        "WORKER-1.site.example.",
        "*.site.example",
        "10250",
        "9100, 8000-8080",
        "10.244.0.0/16",
        "[fd00:244::/64]:443,8443",
        "[2001:db8::1]:10262",
        "cloud.example.com:10262",
        "http://user:p%40ss@proxy.example.com:3128",
        "1h30m",
        "64MiB",
        "a5a5a5",
    ]
    .map(|name| name.as_bytes().to_vec())
    .into())
}

/// The text form of each value parses to the value. A node's name is in lower case.
pub(super) fn check_name(input: &[u8]) -> Result<()> {
    let text = String::from_utf8_lossy(input);
    if let Ok(name) = text.parse::<NodeName>() {
        let lower = name.as_str();
        ensure!(!lower.contains(|c: char| c.is_ascii_uppercase()), "{name}");
        ensure!(lower.parse::<NodeName>()? == name, "{name} is another name");
        ensure!(lower.len() <= text.len(), "{name} is longer");
    }
    if let Ok(port) = text.parse::<Port>() {
        ensure!(port.to_string().parse::<Port>()? == port, "{port}");
    }
    if let Ok(address) = parse_address(&text) {
        ensure!(
            address.to_string().parse::<SocketAddr>()? == address,
            "{address}"
        );
    }
    let _any = (text.parse::<Cidr>(), text.parse::<PortSet>());
    let _any = (text.parse::<DirectTarget>(), text.parse::<NamePattern>());
    let _any = (text.parse::<ServerAddress>(), text.parse::<HttpProxy>());
    let _any = (parse_duration(&text), parse_size(&text), decode_hex(&text));
    Ok(())
}

pub(super) fn configurations() -> Result<Vec<Vec<u8>>> {
    Ok([
        "advertise: [cloud.example.com:10262]\nhttpProxyPorts: \"9100, 80\"\nlimits:\n  streamsPerAgent: 64\n",
        "services:\n  - { name: ssh, listen: \"127.0.0.1:2201\", node: worker-1, target: \"22\" }\n",
        "dnsRecords:\n  - { name: master-1, addresses: [192.168.33.220] }\ndnsListen: [\"127.0.0.1:53\"]\n",
        "cloudApiserver: [\"192.0.2.1:6443\"]\ncloud:\n  - { name: a, service: \"b/c:1\", nodes: [\"*\"] }\n",
        "server: [cloud.example.com:10262]\nnodeName: worker-1\ntoken: abcdef012345.a5.11\n",
        "# nothing\n",
    ]
    .map(|text| text.as_bytes().to_vec())
    .into())
}

/// Parses and checks the settings of both ends, as their `check-config` does.
pub(super) fn check_configuration(input: &[u8]) -> Result<()> {
    let Ok(text) = std::str::from_utf8(input) else {
        return Ok(());
    };
    if let Ok(Some(raw)) = yaml::parse::<tunnel_server::config::RawConfig>(text) {
        let _any = tunnel_server::config::Config::try_from(raw);
    }
    if let Ok(Some(settings)) = yaml::parse::<tunnel_agent::config::RawConfig>(text) {
        let _any = tunnel_agent::config::Config::check(settings);
    }
    Ok(())
}

pub(super) fn persisted() -> Result<Vec<Vec<u8>>> {
    let data = Data::new()?;
    data.dir
        .set_advertised(&["cloud.example.com:10262".to_owned()])?;
    Ok(vec![
        b"# users\nprometheus:correct horse battery staple\n".to_vec(),
        std::fs::read(data.dir.advertise())?,
        // Rows of the store: DNS records, orders, tokens, and known nodes.
        b"\x01[\"192.0.2.1\",\"2001:db8::1\"]".to_vec(),
        b"\x01{\"order\":{\"counter\":3,\"revoked\":true,\"at\":7,\"generation\":1,\"reissuedAt\":5},\"unconfirmed\":{\"isRevoked\":true}}".to_vec(),
        b"\x01{\"node\":\"worker-1\",\"secretSha256\":\"a5\",\"ips\":[\"192.0.2.1\"],\"counter\":1,\"generation\":0,\"created\":\"2025-01-01T00:00:00Z\",\"ttlSeconds\":60,\"revoked\":false}".to_vec(),
        b"\x01{\"addresses\":[\"192.0.2.1\"],\"firstSeen\":\"2025-01-01T00:00:00Z\",\"lastSeen\":null,\"certificateNotAfter\":null,\"certificateIssued\":null,\"enrollment\":\"joinToken\"}".to_vec(),
        b"\x02{}".to_vec(),
    ])
}

/// Reads each file of the data directory, and a password file, with the same content, and rows of
/// the store.
pub(super) fn check_persisted(input: &[u8]) -> Result<()> {
    thread_local! {
        static DATA: Result<Data> = Data::new();
    }
    tunnel_ca::check_rows(input);
    tunnel_store::check_rows(input);
    DATA.with(|data| {
        let data = data.as_ref().ok().context("a data directory")?;
        let dir = &data.dir;
        let passwords = dir.path().join("passwords");
        for file in [&dir.advertise(), &passwords] {
            std::fs::write(file, input)?;
        }
        let _any = dir.advertised();
        let _any = BasicAuthUsers::load(&passwords);
        Ok(())
    })
}

/// A data directory that exists as long as the thread.
struct Data {
    dir: DataDir,
    _scratch: ScratchDir,
}

impl Data {
    fn new() -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let dir = DataDir::open(scratch.path())?;
        Ok(Self {
            dir,
            _scratch: scratch,
        })
    }
}
