//! The verb `address`: gives an interface of this host an address for `--cloud-listen`, or removes
//! it. Another run changes nothing.

use std::io;
use std::net::IpAddr;

use futures_util::TryStreamExt as _;
use rtnetlink::packet_route::address::AddressScope;
use rtnetlink::{Error, Handle, new_connection};

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
    #[error("cannot ask the kernel over netlink")]
    Netlink(#[source] io::Error),
}

/// Makes the change. Cancel-safe, but the change may be made already.
///
/// # Errors
/// Returns an [`AddressError`]. An address that is there, or is gone, already is none.
pub async fn change(change: &AddressChange) -> Result<(), AddressError> {
    let (connection, handle, _messages) = new_connection().map_err(AddressError::Netlink)?;
    tokio::select! {
        changed = send(&handle, change) => changed,
        () = connection => Err(AddressError::Netlink(io::ErrorKind::ConnectionAborted.into())),
    }
}

async fn send(handle: &Handle, change: &AddressChange) -> Result<(), AddressError> {
    let (AddressChange::Add(arguments) | AddressChange::Remove(arguments)) = change;
    let AddressArgs { address, interface } = arguments;
    let index = index(handle, interface).await?;
    let prefix = match address {
        IpAddr::V4(_) => 32,
        IpAddr::V6(_) => 128,
    };
    let mut request = handle.address().add(index, *address, prefix).replace();
    if address.is_ipv4() {
        // No other interface uses the address as a source.
        request.message_mut().header.scope = AddressScope::Host;
    }
    let changed = match change {
        AddressChange::Add(_) => request.execute().await,
        AddressChange::Remove(_) => {
            let message = request.message_mut().clone();
            handle.address().del(message).execute().await
        }
    };
    let failure = match changed {
        Ok(()) => return Ok(()),
        Err(Error::NetlinkError(message)) => message.to_io(),
        Err(other) => io::Error::other(other),
    };
    match (failure.kind(), change) {
        (io::ErrorKind::PermissionDenied, _) => Err(AddressError::NotPermitted(interface.clone())),
        (io::ErrorKind::AddrNotAvailable, AddressChange::Remove(_)) => {
            match prefix_of(handle, index, *address).await? {
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

async fn index(handle: &Handle, interface: &str) -> Result<u32, AddressError> {
    let mut links = handle.link().get().match_name(interface).execute();
    let no_interface = || AddressError::NoInterface(interface.to_owned());
    match links.try_next().await {
        Ok(Some(link)) => Ok(link.header.index),
        Ok(None) => Err(no_interface()),
        Err(Error::NetlinkError(message)) if message.raw_code() == -NO_DEVICE => {
            Err(no_interface())
        }
        Err(other) => Err(AddressError::Netlink(io::Error::other(other))),
    }
}

/// Returns the length of the prefix with which an interface has an address.
async fn prefix_of(
    handle: &Handle,
    index: u32,
    address: IpAddr,
) -> Result<Option<u8>, AddressError> {
    let request = handle.address().get().set_link_index_filter(index);
    let mut found = request.set_address_filter(address).execute();
    let found = found.try_next().await;
    let found = found.map_err(|error| AddressError::Netlink(io::Error::other(error)))?;
    Ok(found.map(|message| message.header.prefix_len))
}

/// `ENODEV` of Linux, for an interface that does not exist.
const NO_DEVICE: i32 = 19;
