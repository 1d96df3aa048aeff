//! Admission of a session, from the header of the control stream to Welcome.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout};
use tunnel_proto::session::control::{self, ControlReader, ControlWriter};
use tunnel_proto::transport::{CloseReason, IncomingStream, Session, SessionError};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::control::{
    CAPABILITY_DIAG, CAPABILITY_RENEW_SOON, ControlMessage, Hello, Welcome,
};
use tunnel_proto::wire::header::StreamKind;
use tunnel_proto::wire::{VERSION_MAX, VERSION_MIN, negotiate_version};

use super::context::SessionContext;
use crate::node_ip::NodeIp;

/// The reason why a connection did not become a ready session.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AdmitError {
    /// The server refused the session.
    #[error("server did not admit this agent ({code}): {detail}")]
    NotAdmitted { code: CloseCode, detail: String },
    /// The session ended during admission.
    #[error(transparent)]
    Closed(#[from] CloseReason),
    /// Welcome did not arrive in time.
    #[error("no Welcome from the server in time")]
    Timeout,
    #[error(
        "server speaks protocol versions {0} to {1}, this agent {VERSION_MIN} to {VERSION_MAX}; update the older one"
    )]
    Version(u32, u32),
    /// The server sent a message that is not allowed during admission.
    #[error("server broke the protocol: {0}")]
    Protocol(&'static str),
    #[error("control stream failed")]
    Control(#[from] io::Error),
}

impl AdmitError {
    /// Returns the close code that the server or this end gave.
    pub(crate) fn code(&self) -> Option<CloseCode> {
        match self {
            Self::NotAdmitted { code, .. } => Some(*code),
            Self::Closed(reason) => Some(reason.code),
            Self::Version(..) => Some(CloseCode::Version),
            Self::Timeout => Some(CloseCode::HandshakeTimeout),
            Self::Protocol(_) | Self::Control(_) => Some(CloseCode::Protocol),
        }
    }
}

/// The initial state of an admitted session.
pub(super) struct Admitted {
    pub(super) reader: ControlReader,
    pub(super) writer: ControlWriter,
    pub(super) welcome: Welcome,
}

/// Waits for Welcome until the time limit or the start of a drain, and closes the session on
/// failure.
pub(super) async fn admit(
    session: &Arc<dyn Session>,
    context: &SessionContext,
    node_ip: Option<NodeIp>,
) -> Result<Admitted, AdmitError> {
    let within = context.limits.handshake_timeout;
    let admitted = tokio::select! {
        biased;
        () = context.shutdown.drain().cancelled() => {
            let reason = CloseReason::local(CloseCode::Draining, STOPPING);
            Err(AdmitError::Closed(reason))
        }
        admitted = timeout(within, handshake(&**session, context, node_ip)) => {
            admitted.unwrap_or(Err(AdmitError::Timeout))
        }
    };
    if let Err(error) = &admitted {
        let code = match error.code() {
            Some(
                code @ (CloseCode::Version | CloseCode::HandshakeTimeout | CloseCode::Protocol),
            ) => code,
            Some(_) | None => CloseCode::Normal,
        };
        session.close(code, &error.to_string()).await;
    }
    admitted
}

async fn handshake(
    session: &dyn Session,
    context: &SessionContext,
    node_ip: Option<NodeIp>,
) -> Result<Admitted, AdmitError> {
    let incoming = match session.accept().await {
        Ok(incoming) => incoming,
        Err(SessionError::Closed(reason)) => return Err(reason.into()),
        Err(SessionError::NotOpening | SessionError::NoRoom | SessionError::Header(_)) => {
            return Err(AdmitError::Protocol("session accepts no streams"));
        }
    };
    let outcome = tokio::select! {
        biased;
        // First, since the server's messages before the close contain more than the close code.
        outcome = exchange_hello(incoming, context, node_ip) => outcome,
        reason = session.closed() => Err(reason.into()),
    };
    match outcome {
        Err(error @ (AdmitError::Control(_) | AdmitError::Protocol(_))) => {
            // The reason of a closed session is more specific than the failure of its streams.
            match timeout(CLOSE_REASON_TIMEOUT, session.closed()).await {
                Ok(reason) => Err(reason.into()),
                Err(_still_open) => Err(error),
            }
        }
        outcome => outcome,
    }
}

/// Accepts the control stream, sends Hello, and waits for Welcome.
async fn exchange_hello(
    incoming: IncomingStream,
    context: &SessionContext,
    node_ip: Option<NodeIp>,
) -> Result<Admitted, AdmitError> {
    let deadline = Instant::now() + context.limits.handshake_timeout;
    let (header, mut stream) = incoming.header(deadline).await?;
    let StreamKind::Control {
        version_min,
        version_max,
    } = header.kind
    else {
        return Err(AdmitError::Protocol(
            "first stream is not the control stream",
        ));
    };
    negotiate_version(version_min, version_max)
        .ok_or(AdmitError::Version(version_min, version_max))?;
    stream.accept("").await?;
    let (mut reader, mut writer) = control::split(stream);
    writer
        .send(&ControlMessage::Hello(Box::new(hello(context, node_ip))))
        .await?;
    let welcome = recv_welcome(&mut reader).await?;
    Ok(Admitted {
        reader,
        writer,
        welcome,
    })
}

async fn recv_welcome(reader: &mut ControlReader) -> Result<Welcome, AdmitError> {
    loop {
        match reader.receive().await? {
            Some(ControlMessage::Welcome(welcome)) => return Ok(welcome),
            Some(ControlMessage::NotAdmitted(code, detail)) => {
                return Err(AdmitError::NotAdmitted { code, detail });
            }
            Some(ControlMessage::Unknown) => {}
            Some(
                ControlMessage::Hello(_)
                | ControlMessage::Drain { .. }
                | ControlMessage::Members(_)
                | ControlMessage::Withdraw
                | ControlMessage::Bye(_)
                | ControlMessage::Renew(_)
                | ControlMessage::Lost(_)
                | ControlMessage::DiagRequest
                | ControlMessage::DiagReply(_)
                | ControlMessage::RenewSoon(_)
                | ControlMessage::Renewed(_)
                | ControlMessage::Suspect(_)
                | ControlMessage::Receiving,
            ) => return Err(AdmitError::Protocol("unexpected message before Welcome")),
            None => return Err(AdmitError::Protocol("control stream ended before Welcome")),
        }
    }
}

fn hello(context: &SessionContext, node_ip: Option<NodeIp>) -> Hello {
    Hello {
        versions: (VERSION_MIN, VERSION_MAX),
        capabilities: context
            .facts
            .iter()
            .map(|_offered| CAPABILITY_DIAG)
            .chain([CAPABILITY_RENEW_SOON])
            .map(str::to_owned)
            .collect(),
        node_name: context.node.clone(),
        instance: context.instance,
        software: env!("CARGO_PKG_VERSION").to_owned(),
        node_ip: node_ip.map_or_else(String::new, |node| node.ip.to_string()),
        labels: context.labels.clone(),
    }
}

/// Reason that a draining agent sends.
pub(super) const STOPPING: &str = "agent is stopping";
/// Time to wait for the reason of a session's end after its streams have failed.
pub(super) const CLOSE_REASON_TIMEOUT: Duration = Duration::from_millis(100);
