//! Information about the host of the process: its name, its source addresses, and the resources of
//! the process.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::path::Path;

use nix::ifaddrs::{InterfaceAddress, getifaddrs};
use nix::net::if_::InterfaceFlags;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::networks::forbidden_kind;

const HOST_NAME_FILE: &str = "/proc/sys/kernel/hostname";

/// A family of IP addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IpFamily {
    /// IPv4, as in RFC 791.
    V4,
    /// IPv6, as in RFC 8200.
    V6,
}

impl IpFamily {
    /// Returns the family of an address.
    pub fn of(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(_) => Self::V4,
            IpAddr::V6(_) => Self::V6,
        }
    }

    /// Returns the family that this one is not.
    pub fn other(self) -> Self {
        match self {
            Self::V4 => Self::V6,
            Self::V6 => Self::V4,
        }
    }

    /// Returns a documentation address (RFC 5737, RFC 3849). Only the default route leads to it.
    fn behind_default_route(self) -> IpAddr {
        match self {
            Self::V4 => Ipv4Addr::new(192, 0, 2, 1).into(),
            Self::V6 => Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into(),
        }
    }
}

/// Returns the host's name without surrounding white space.
///
/// # Errors
/// When the system does not provide the name.
pub fn host_name() -> io::Result<String> {
    Ok(std::fs::read_to_string(HOST_NAME_FILE)?.trim().to_owned())
}

/// Returns a number among the settings of the kernel, such as `net.core.rmem_max`.
///
/// # Errors
/// When the system has no such setting, or does not show it. The text has the path.
pub fn kernel_number(setting: &str) -> io::Result<u64> {
    let path = format!("/proc/sys/{}", setting.replace('.', "/"));
    let text = std::fs::read_to_string(&path)
        .map_err(|error| io::Error::new(error.kind(), format!("{path}: {error}")))?;
    text.trim()
        .parse()
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, format!("{path}: {error}")))
}

/// Returns the address from which this host reaches `remote`. Connecting a UDP socket sends
/// nothing; the call only queries the routing table.
pub fn source_address(remote: SocketAddr) -> Option<IpAddr> {
    let any: IpAddr = if remote.is_ipv4() {
        Ipv4Addr::UNSPECIFIED.into()
    } else {
        Ipv6Addr::UNSPECIFIED.into()
    };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(remote).ok()?;
    let address = socket.local_addr().ok()?.ip().to_canonical();
    (!address.is_unspecified()).then_some(address)
}

/// Returns whether this host has the address.
pub fn is_own_address(ip: IpAddr) -> bool {
    let ip = ip.to_canonical();
    // A host reaches its addresses from themselves, except for the second IPv4 address of a network,
    // which it reaches from the first one. The port does not matter because nothing is sent.
    ip.is_loopback() || source_address((ip, 9).into()) == Some(ip) || reaches_itself(ip)
}

/// Returns whether a socket with the IPv4 address can reach it. Where `net.ipv4.ip_nonlocal_bind` is
/// set, a socket may have the address of another host, but reaches none.
fn reaches_itself(ip: IpAddr) -> bool {
    ip.is_ipv4() && UdpSocket::bind((ip, 0)).is_ok_and(|socket| socket.connect((ip, 9)).is_ok())
}

/// Returns the names of the interfaces that have the address, up or not.
pub fn interfaces_of(ip: IpAddr) -> Vec<String> {
    let interfaces = getifaddrs().into_iter().flatten();
    let with_address = interfaces.filter(|interface| address_of(interface) == Some(ip));
    with_address
        .map(|interface| interface.interface_name)
        .collect()
}

/// Returns the address of this host, IPv4 first.
pub fn primary_address() -> Option<IpAddr> {
    main_address(IpFamily::V4).or_else(|| main_address(IpFamily::V6))
}

/// Returns this host's address of one family: the source address of its default route, or else the
/// first one of an interface. Loopback, link-local and similar addresses do not count.
pub fn main_address(family: IpFamily) -> Option<IpAddr> {
    let is_usable = |ip: &IpAddr| {
        IpFamily::of(*ip) == family && !ip.is_loopback() && forbidden_kind(*ip).is_none()
    };
    source_address((family.behind_default_route(), 9).into())
        .filter(is_usable)
        .or_else(|| interface_addresses().into_iter().find(is_usable))
}

/// Returns the addresses of all interfaces that are up.
fn interface_addresses() -> Vec<IpAddr> {
    let Ok(interfaces) = getifaddrs() else {
        return Vec::new();
    };
    let up = interfaces.filter(|interface| interface.flags.contains(InterfaceFlags::IFF_UP));
    up.filter_map(|interface| address_of(&interface)).collect()
}

fn address_of(interface: &InterfaceAddress) -> Option<IpAddr> {
    let address = interface.address.as_ref()?;
    let v4 = address.as_sockaddr_in().map(|address| address.ip().into());
    v4.or_else(|| address.as_sockaddr_in6().map(|address| address.ip().into()))
}

/// The resource limits of the process. `None` means that there is no limit, or that it cannot be
/// read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resources {
    /// Number of open files.
    pub descriptors: Option<u64>,
    /// Memory in bytes: the limit of the process's cgroup, or else the memory of the host.
    pub memory: Option<u64>,
}

impl Resources {
    /// Returns the memory limit as text.
    pub fn memory_text(&self) -> String {
        self.memory
            .map_or_else(|| "none".to_owned(), super::settings::format_size)
    }

    /// Reads the limits of this process.
    pub fn of_process() -> Self {
        Self {
            descriptors: getrlimit(Resource::Nofile).current,
            memory: memory_limit(Path::new("/")),
        }
    }
}

/// Raises the soft limit of open files to the hard limit, as Go's runtime does.
///
/// # Errors
/// When the system refuses.
pub fn raise_descriptor_limit() -> io::Result<()> {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    Ok(setrlimit(Resource::Nofile, raised)?)
}

/// Returns the least of the limits of the process's cgroup, of its parent cgroups, and of the
/// host's memory.
fn memory_limit(root: &Path) -> Option<u64> {
    let read = |path: &Path| std::fs::read_to_string(root.join(path)).ok();
    let cgroups = read(Path::new("proc/self/cgroup")).unwrap_or_default();
    let of_cgroups = cgroups.lines().flat_map(|line| {
        // The line has the form hierarchy:controllers:path. Version 2 has the hierarchy 0 and no
        // controllers (cgroups(7)).
        let mut fields = line.splitn(3, ':').skip(1);
        let (base, file) = match fields.next() {
            Some("") => ("sys/fs/cgroup", "memory.max"),
            Some(list) if list.split(',').any(|name| name == "memory") => {
                ("sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            Some(_) | None => return Vec::new(),
        };
        let path = Path::new(fields.next().unwrap_or("/").trim_start_matches('/'));
        // In a container the path may be the host's. In that case the limit is at the mount's root.
        let limits = path
            .ancestors()
            .filter_map(|above| read(&Path::new(base).join(above).join(file)));
        limits
            .filter_map(|text| text.trim().parse().ok())
            .collect::<Vec<u64>>()
    });
    let of_host = read(Path::new("proc/meminfo")).and_then(|text| {
        let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
        let kib: u64 = total?.trim().strip_suffix("kB")?.trim().parse().ok()?;
        kib.checked_mul(1024)
    });
    of_cgroups.chain(of_host).min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::ScratchDir;

    fn host(files: &[(&str, &str)]) -> ScratchDir {
        let root = ScratchDir::new().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn memory_limit_is_the_least_of_cgroups_and_host() {
        let meminfo = ("proc/meminfo", "MemTotal:        1024 kB\nMemFree: 1 kB\n");
        let v1 = "5:memory:/a/b\n4:cpu,cpuacct:/\n";
        for (name, files, limit) in [
            ("none", vec![], None),
            ("host", vec![meminfo], Some(1 << 20)),
            (
                "v2",
                vec![
                    meminfo,
                    ("proc/self/cgroup", "0::/pod/container\n"),
                    ("sys/fs/cgroup/pod/container/memory.max", "max\n"),
                    ("sys/fs/cgroup/pod/memory.max", "65536\n"),
                ],
                Some(65536),
            ),
            (
                "v1",
                vec![
                    meminfo,
                    ("proc/self/cgroup", v1),
                    ("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "4096\n"),
                    (
                        "sys/fs/cgroup/memory/memory.limit_in_bytes",
                        "9223372036854771712\n",
                    ),
                ],
                Some(4096),
            ),
        ] {
            let root = host(&files);
            assert_eq!(memory_limit(root.path()), limit, "{name}");
        }
    }

    #[test]
    fn number_of_the_kernel_is_read_and_an_unknown_setting_is_named() {
        assert!(kernel_number("kernel.pid_max").unwrap() > 0);
        let error = kernel_number("net.core.no_such").unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("/proc/sys/net/core/no_such: ")
        );
    }

    #[test]
    fn descriptors_of_this_process_are_known_and_can_be_raised() {
        raise_descriptor_limit().unwrap();
        let known = Resources::of_process().descriptors;
        assert_eq!(known, getrlimit(Resource::Nofile).maximum);
    }

    #[test]
    fn own_addresses_are_loopback_and_that_of_the_default_route_and_no_other() {
        assert!(is_own_address(Ipv4Addr::LOCALHOST.into()));
        assert!(is_own_address(Ipv4Addr::new(127, 0, 0, 9).into()));
        assert!(is_own_address("::ffff:127.0.0.1".parse().unwrap()));
        if let Some(primary) = primary_address() {
            assert!(is_own_address(primary), "{primary}");
        }
        for family in [IpFamily::V4, IpFamily::V6] {
            let other = family.behind_default_route();
            assert!(!is_own_address(other), "{other}");
            if let Some(main) = main_address(family) {
                assert!(is_own_address(main), "{main}");
            }
        }
        // The kernel tells a link-local address from those of other links by its interface.
        let is_global = |ip: &IpAddr| forbidden_kind(*ip).is_none();
        let mut global = interface_addresses().into_iter().filter(is_global);
        assert_eq!(global.find(|ip| !is_own_address(*ip)), None);
    }
}
