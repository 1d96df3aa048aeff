//! The verb `address`: gives an interface of this host an address for `--cloud-listen`, or removes
//! it. Another run changes nothing.

use std::io;
use std::net::IpAddr;

use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};
use nix::ifaddrs::getifaddrs;
use nix::net::if_::if_nametoindex;

use crate::cli::{AddressArgs, AddressChange};

/// The reason why an address cannot be added or removed.
#[derive(Debug, thiserror::Error)]
pub enum AddressError {
    #[error(
        "cannot change the addresses of {0}: not permitted; run the command as root, or with the \
         capability NET_ADMIN"
    )]
    NotPermitted(String),
    #[error("there is no interface {0}; --interface needs a name that `ip link` shows")]
    NoInterface(String),
    #[error(
        "{interface} has {address}/{prefix}, which this command did not add; to remove it: ip address del \
         {address}/{prefix} dev {interface}"
    )]
    OtherPrefix {
        interface: String,
        address: IpAddr,
        prefix: u8,
    },
    #[error("cannot change the addresses of {0}")]
    Refused(String, #[source] io::Error),
    #[error("cannot list the addresses of this host")]
    Addresses(#[source] io::Error),
}

/// Makes the change.
///
/// # Errors
/// Returns an [`AddressError`]. An address that is there, or is gone, already is none.
pub fn change(change: &AddressChange) -> Result<(), AddressError> {
    let (AddressChange::Add(arguments) | AddressChange::Remove(arguments)) = change;
    let AddressArgs { address, interface } = arguments;
    let index = if_nametoindex(interface.as_str())
        .map_err(|_no_device| AddressError::NoInterface(interface.clone()))?;
    let Err(failure) = request(&message(change, index)) else {
        return Ok(());
    };
    match (failure.kind(), change) {
        (io::ErrorKind::PermissionDenied, _) => Err(AddressError::NotPermitted(interface.clone())),
        (io::ErrorKind::AddrNotAvailable, AddressChange::Remove(_)) => {
            match prefix_of(interface, *address).map_err(AddressError::Addresses)? {
                None => Ok(()),
                Some(prefix) => Err(AddressError::OtherPrefix {
                    interface: interface.clone(),
                    address: *address,
                    prefix,
                }),
            }
        }
        _ => Err(AddressError::Refused(interface.clone(), failure)),
    }
}

/// Returns the message that makes the change (rtnetlink(7)): its header, `ifaddrmsg`, and the address
/// in two attributes.
fn message(change: &AddressChange, index: u32) -> Vec<u8> {
    let (kind, flags, address) = match change {
        AddressChange::Add(arguments) => (
            RTM_NEWADDR,
            NLM_F_REQUEST | NLM_F_ACK | NLM_F_REPLACE | NLM_F_CREATE,
            arguments.address,
        ),
        AddressChange::Remove(arguments) => {
            (RTM_DELADDR, NLM_F_REQUEST | NLM_F_ACK, arguments.address)
        }
    };
    let (family, prefix, scope, octets) = match address {
        // No other interface uses the address as a source.
        IpAddr::V4(ip) => (AF_INET, 32, RT_SCOPE_HOST, ip.octets().to_vec()),
        IpAddr::V6(ip) => (AF_INET6, 128, RT_SCOPE_UNIVERSE, ip.octets().to_vec()),
    };
    let attribute_len = 4 + u16::from(prefix / 8);
    let len = HEADER_LEN + 8 + 2 * u32::from(attribute_len);
    let mut message = [
        &len.to_ne_bytes()[..],
        &kind.to_ne_bytes(),
        &flags.to_ne_bytes(),
    ]
    .concat();
    // A sequence number and a port, which one request needs not.
    message.extend([0; 8]);
    message.extend([family, prefix, 0, scope]);
    message.extend(index.to_ne_bytes());
    for attribute in [IFA_ADDRESS, IFA_LOCAL] {
        message.extend(attribute_len.to_ne_bytes());
        message.extend(attribute.to_ne_bytes());
        message.extend(&octets);
    }
    message
}

/// Sends a message to the kernel, which answers with an error number at once.
fn request(message: &[u8]) -> io::Result<()> {
    let socket = Socket::new(NETLINK_ROUTE)?;
    socket.send_to(message, &SocketAddr::new(0, 0), 0)?;
    let (answer, _kernel) = socket.recv_from_full()?;
    let code = answer.get(16..20).and_then(|code| code.try_into().ok());
    match code.map(i32::from_ne_bytes) {
        Some(0) => Ok(()),
        Some(code) => Err(io::Error::from_raw_os_error(code.saturating_neg())),
        None => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Returns the length of the prefix with which an interface has an address.
fn prefix_of(interface: &str, address: IpAddr) -> io::Result<Option<u8>> {
    let ip = |socket: &nix::sys::socket::SockaddrStorage| {
        let v4 = socket
            .as_sockaddr_in()
            .map(|socket| IpAddr::V4(socket.ip()));
        v4.or_else(|| Some(IpAddr::V6(socket.as_sockaddr_in6()?.ip())))
    };
    let mut listed = getifaddrs()?.filter(|listed| listed.interface_name == interface);
    let found = listed.find(|listed| listed.address.as_ref().and_then(ip) == Some(address));
    let ones = match found.and_then(|found| ip(&found.netmask?)) {
        Some(IpAddr::V4(mask)) => mask.to_bits().count_ones(),
        Some(IpAddr::V6(mask)) => mask.to_bits().count_ones(),
        None => return Ok(None),
    };
    Ok(u8::try_from(ones).ok())
}

/// Length of the header of a message, whose type and flags follow its length.
const HEADER_LEN: u32 = 16;
const RTM_NEWADDR: u16 = 20;
const RTM_DELADDR: u16 = 21;
const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_ACK: u16 = 0x4;
const NLM_F_REPLACE: u16 = 0x100;
const NLM_F_CREATE: u16 = 0x400;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
const RT_SCOPE_UNIVERSE: u8 = 0;
const RT_SCOPE_HOST: u8 = 254;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
