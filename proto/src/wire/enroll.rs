//! Typed messages of enrollment, and the join token (`ID.SECRET.CAHASH`).

use std::fmt;
use std::str::FromStr;

use bytes::BytesMut;
use prost::Message;
use zeroize::{Zeroize as _, Zeroizing};

use super::code::EnrollCode;
use super::frame::{self, ENROLL_MESSAGE_MAX, FrameError};
use super::header::one_line;
use super::name::NodeName;
use super::pb;

/// Number of characters in a token's id.
pub const TOKEN_ID_LEN: usize = 12;
/// Number of bytes in a token's secret. 128 bits and more cannot be guessed.
pub const TOKEN_SECRET_BYTES: usize = 24;
/// Number of bytes in the CA's hash: the SHA-256 of its SubjectPublicKeyInfo.
pub const CA_HASH_BYTES: usize = 32;

/// The label of the TLS exporter (RFC 8446, section 7.5) whose output the key of an expired
/// certificate signs.
pub const RENEW_LABEL: &[u8] = b"culvert-renew";
/// Number of exporter bytes that are signed.
pub const RENEW_EXPORT_BYTES: usize = 32;

/// The request by which an agent gets its first certificate, or renews an expired one.
#[derive(Clone, PartialEq, Eq)]
pub struct EnrollRequest {
    /// The join token or ServiceAccount token of the agent. Empty if `proof` is set.
    pub token: Zeroizing<String>,
    /// The PKCS#10 request in DER. Its names are ignored.
    pub csr: Vec<u8>,
    /// The node name that the agent claims.
    pub node_name: NodeName,
    /// The proof that replaces the token when an expired certificate is renewed.
    pub proof: Option<RenewalProof>,
    /// The server that forwards the request knows the node. Agents do not send it.
    pub is_known: bool,
}

/// A proof that the requester holds the key of a certificate. The proof is bound to this TLS
/// connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenewalProof {
    /// The certificate chain in DER, leaf first.
    pub chain: Vec<Vec<u8>>,
    /// The signature by the certificate's key over [`RENEW_EXPORT_BYTES`] of the exporter with
    /// [`RENEW_LABEL`] and no context.
    pub signature: Vec<u8>,
    /// The TLS SignatureScheme of the signature (RFC 8446, section 4.2.3).
    pub scheme: u16,
}

impl fmt::Debug for EnrollRequest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("EnrollRequest")
            .field("node_name", &self.node_name)
            .finish_non_exhaustive()
    }
}

/// The reply to an [`EnrollRequest`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EnrollReply {
    /// The server issued a certificate. All certificates are DER.
    Issued {
        /// The issued chain, leaf first.
        chain: Vec<Vec<u8>>,
        /// The roots that servers of this installation chain to.
        roots: Vec<Vec<u8>>,
    },
    /// The server issued no certificate. The text is a one-line reason for people.
    Refused(EnrollCode, String),
}

impl EnrollRequest {
    /// Appends the framed request.
    ///
    /// # Errors
    /// [`FrameError::TooLarge`] above [`ENROLL_MESSAGE_MAX`].
    pub fn encode(&self, out: &mut BytesMut) -> Result<(), FrameError> {
        let proof = self.proof.as_ref();
        let mut message = pb::EnrollRequest {
            token: String::clone(&self.token),
            csr: self.csr.clone(),
            node_name: self.node_name.to_string(),
            old_chain: proof.map_or_else(Vec::new, |proof| proof.chain.clone()),
            proof: proof.map_or_else(Vec::new, |proof| proof.signature.clone()),
            proof_scheme: proof.map_or(0, |proof| proof.scheme.into()),
            is_known: self.is_known,
        };
        let encoded = frame::encode(&message, ENROLL_MESSAGE_MAX, out);
        message.token.zeroize();
        encoded
    }

    /// Decodes the content of one frame.
    ///
    /// # Errors
    /// [`FrameError::Malformed`] or [`FrameError::Invalid`].
    pub fn decode(frame: &[u8]) -> Result<Self, FrameError> {
        let mut message = pb::EnrollRequest::decode(frame)?;
        let token = Zeroizing::new(std::mem::take(&mut message.token));
        let node_name = message
            .node_name
            .parse()
            .map_err(|_syntax| FrameError::Invalid("node name"))?;
        let scheme = u16::try_from(message.proof_scheme)
            .map_err(|_range| FrameError::Invalid("signature scheme"))?;
        let proof = (!message.old_chain.is_empty()).then_some(RenewalProof {
            chain: message.old_chain,
            signature: message.proof,
            scheme,
        });
        Ok(Self {
            token,
            csr: message.csr,
            node_name,
            proof,
            is_known: message.is_known,
        })
    }
}

impl EnrollReply {
    /// Appends the framed reply.
    ///
    /// # Errors
    /// [`FrameError::TooLarge`] above [`ENROLL_MESSAGE_MAX`].
    pub fn encode(&self, out: &mut BytesMut) -> Result<(), FrameError> {
        frame::encode(&self.to_message(), ENROLL_MESSAGE_MAX, out)
    }

    pub(super) fn to_message(&self) -> pb::EnrollReply {
        match self {
            Self::Issued { chain, roots } => pb::EnrollReply {
                code: 0,
                detail: String::new(),
                certificate_chain: chain.clone(),
                roots: roots.clone(),
            },
            Self::Refused(code, detail) => pb::EnrollReply {
                code: code.number(),
                detail: one_line(detail),
                certificate_chain: Vec::new(),
                roots: Vec::new(),
            },
        }
    }

    pub(super) fn from_message(message: pb::EnrollReply) -> Self {
        match message.code {
            0 => Self::Issued {
                chain: message.certificate_chain,
                roots: message.roots,
            },
            code => Self::Refused(EnrollCode::from_number(code), one_line(&message.detail)),
        }
    }

    /// Decodes the content of one frame.
    ///
    /// # Errors
    /// [`FrameError::Malformed`].
    pub fn decode(frame: &[u8]) -> Result<Self, FrameError> {
        Ok(Self::from_message(pb::EnrollReply::decode(frame)?))
    }
}

/// Returns whether a token is a ServiceAccount token, which is a JSON web token. Such tokens begin
/// with `{"` in base64url (RFC 7515, section 3.1). Join tokens begin with an id that has no capital
/// letters.
pub fn is_service_account_token(text: &str) -> bool {
    text.trim_start().starts_with("eyJ")
}

/// A join token: `ID.SECRET.CAHASH`.
///
/// The id is public (logs, lists). The secret proves the right to enroll. The hash pins the
/// server's CA, so that the token is never sent to another server. An agent with a token without
/// the hash needs the CA certificate.
#[derive(Clone, PartialEq, Eq)]
pub struct JoinToken {
    id: String,
    secret: Zeroizing<Vec<u8>>,
    ca_hash: Option<[u8; CA_HASH_BYTES]>,
}

/// The reason why a text is not a join token. The error never contains the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// The text does not have two or three parts separated by dots.
    #[error(
        "not a join token: expected ID.SECRET.CAHASH, as printed by 'tunnel-server token create'"
    )]
    InvalidFormat,
    /// A part has the wrong length or characters.
    #[error("join token has an invalid {0}; copy the whole token again")]
    InvalidPart(&'static str),
}

impl JoinToken {
    /// Creates a token from its parts.
    ///
    /// # Errors
    /// [`TokenError::InvalidPart`] when the id or the secret has an invalid form.
    pub fn new(
        id: &str,
        secret: &[u8],
        ca_hash: Option<[u8; CA_HASH_BYTES]>,
    ) -> Result<Self, TokenError> {
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        if id.len() != TOKEN_ID_LEN || !id.bytes().all(plain) {
            return Err(TokenError::InvalidPart("id"));
        }
        if secret.len() != TOKEN_SECRET_BYTES {
            return Err(TokenError::InvalidPart("secret"));
        }
        Ok(Self {
            id: id.to_owned(),
            secret: Zeroizing::new(secret.to_vec()),
            ca_hash,
        })
    }

    /// Returns the public id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Returns the bytes of the secret.
    pub fn secret(&self) -> &[u8] {
        &self.secret
    }

    /// Returns the SHA-256 of the CA's SubjectPublicKeyInfo. Returns `None` if the token has no
    /// hash; the agent then needs the CA certificate.
    pub fn ca_hash(&self) -> Option<&[u8; CA_HASH_BYTES]> {
        self.ca_hash.as_ref()
    }

    /// Returns the token as text, including its secret. The caller must wipe the text.
    pub fn reveal(&self) -> String {
        // Allocate the full length at once, because a string that grows leaves copies of the secret
        // in memory.
        let room = self.id.len() + 2 * self.secret.len() + 2 * CA_HASH_BYTES + 2;
        let mut text = String::with_capacity(room);
        text.push_str(&self.id);
        text.push('.');
        push_hex(&mut text, &self.secret);
        if let Some(hash) = &self.ca_hash {
            text.push('.');
            push_hex(&mut text, hash);
        }
        text
    }
}

impl fmt::Debug for JoinToken {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("JoinToken")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

impl FromStr for JoinToken {
    type Err = TokenError;

    fn from_str(text: &str) -> Result<Self, TokenError> {
        let mut parts = text.trim().split('.');
        let (Some(id), Some(secret), hash, None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(TokenError::InvalidFormat);
        };
        let secret = Zeroizing::new(decode_hex(secret).ok_or(TokenError::InvalidPart("secret"))?);
        let hash = match hash.map(decode_hex) {
            None => None,
            Some(bytes) => Some(
                bytes
                    .and_then(|bytes| bytes.try_into().ok())
                    .ok_or(TokenError::InvalidPart("CA hash"))?,
            ),
        };
        Self::new(id, &secret, hash)
    }
}

/// Encodes bytes as lower-case hexadecimal text.
pub fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() * 2);
    push_hex(&mut text, bytes);
    text
}

fn push_hex(text: &mut String, bytes: &[u8]) {
    use fmt::Write as _;
    for byte in bytes {
        let _infallible = write!(text, "{byte:02x}");
    }
}

/// Decodes hexadecimal text. Returns `None` if the text is not valid.
pub fn decode_hex(text: &str) -> Option<Vec<u8>> {
    if !text.len().is_multiple_of(2) || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    // Allocate the full length at once, because the bytes may be a secret.
    let mut bytes = Vec::with_capacity(text.len() / 2);
    for pair in text.as_bytes().chunks_exact(2) {
        let digits = std::str::from_utf8(pair).ok()?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token() -> JoinToken {
        let pin = Some([0x11; CA_HASH_BYTES]);
        JoinToken::new("abcdef012345", &[0xa5; TOKEN_SECRET_BYTES], pin).unwrap()
    }

    #[test]
    fn token_round_trips_and_forgives_white_space_around_it() {
        let text = token().reveal();
        for text in [text.clone(), format!(" {text}\n")] {
            assert_eq!(text.parse::<JoinToken>().unwrap(), token());
        }
    }

    #[test]
    fn damaged_tokens_are_refused_and_the_message_holds_no_secret() {
        let text = token().reveal();
        for bad in [
            "",
            "abc",
            "a.b.c.d",
            &text[..text.len() - 1],
            &text[1..],
            &text.replace("a5", "zz"),
        ] {
            let error = bad.parse::<JoinToken>().unwrap_err().to_string();
            assert!(!error.contains("a5a5"), "{error}");
        }
    }

    #[cfg(feature = "io")]
    #[test]
    fn t21_token_is_wiped_when_it_is_dropped() {
        use tunnel_process::secrets::assert_wiped;

        let secret = [0xa5; TOKEN_SECRET_BYTES];
        let token = JoinToken::new("abcdef012345", &secret, None).unwrap();
        assert_eq!(token.secret(), secret);
        assert_wiped(token, JoinToken::secret).unwrap();
        let request = EnrollRequest {
            token: "a ServiceAccount token of some length".to_owned().into(),
            csr: Vec::new(),
            node_name: "worker-1".parse().unwrap(),
            proof: None,
            is_known: false,
        };
        assert_wiped(request, |request| request.token.as_bytes()).unwrap();
    }

    #[test]
    fn debug_never_prints_the_secret() {
        let request = EnrollRequest {
            token: token().reveal().into(),
            csr: vec![1],
            node_name: "n".parse().unwrap(),
            proof: None,
            is_known: false,
        };
        assert!(!format!("{request:?} {:?}", token()).contains("a5a5"));
    }
}
