//! Export and import of the CA of a data directory, so that standalone servers can share it: one
//! PEM text with the certificates and the private key. Calls block the thread.

use tunnel_process::files;
use tunnel_store::data_dir::DataDir;
use zeroize::Zeroizing;

use super::material::{CaMaterial, CaPem, SourceNames};
use super::{CaError, LocalCa, persisted_rotation};

/// The CA of a data directory, compared with another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoredCa {
    /// The directory has no CA.
    Missing,
    /// Both are the same CA.
    Same,
    /// The directory has another CA, or a damaged one.
    Other,
}

/// Returns the CA of a data directory, which is created if there is none.
///
/// # Errors
/// Returns a [`CaError`] that names the file.
pub fn export(dir: &DataDir) -> Result<Zeroizing<String>, CaError> {
    let ca = LocalCa::load_or_create(dir)?;
    let material = ca.material.load();
    let (certificates, key) = (material.certificates_pem().trim_end(), material.key_pem());
    // Text that grows would leave copies of the key in memory.
    let mut pem = Zeroizing::new(String::with_capacity(certificates.len() + key.len() + 1));
    pem.push_str(certificates);
    pem.push('\n');
    pem.push_str(key);
    Ok(pem)
}

/// Parses an exported CA. `name` is the name of the source in errors.
///
/// # Errors
/// Returns a [`CaError`] if the text has no certificate, no key, or several that do not belong
/// together.
pub fn parse(pem: &[u8], name: &str) -> Result<CaMaterial, CaError> {
    let text = std::str::from_utf8(pem).map_err(|error| CaError::Damaged {
        name: name.to_owned(),
        what: "certificate and private key",
        problem: error.to_string(),
    })?;
    let names = SourceNames {
        certificates: name,
        key: name,
    };
    CaPem::split(text)
        .material(names)
        .map_err(|error| match error {
            CaError::Mismatch(..) => {
                CaError::Mismatch("the certificate".to_owned(), format!("the key in {name}"))
            }
            error => error,
        })
}

/// Compares the CA of a data directory with another one.
///
/// # Errors
/// Returns an error if a file cannot be read.
pub fn compare(dir: &DataDir, other: &CaMaterial) -> Result<StoredCa, CaError> {
    let (certificate_path, key_path) = (dir.ca_certificate(), dir.ca_key());
    let names = SourceNames {
        certificates: &certificate_path.display().to_string(),
        key: &key_path.display().to_string(),
    };
    let certificate = files::read(&certificate_path)?;
    let key = files::read_secret(&key_path)?;
    Ok(match (certificate, key) {
        (None, None) => StoredCa::Missing,
        (Some(certificate), Some(key)) => match CaMaterial::parse(&certificate, &key, names) {
            Ok(stored) if stored.is_same(other) => StoredCa::Same,
            Ok(_) | Err(_) => StoredCa::Other,
        },
        (Some(_), None) | (None, Some(_)) => StoredCa::Other,
    })
}

/// Replaces the CA of a data directory, and ends its rotation. No server may use the directory.
///
/// # Errors
/// Returns an error with the path if a file cannot be replaced.
pub fn import(dir: &DataDir, material: &CaMaterial) -> Result<(), CaError> {
    let _changing = dir.lock_files()?;
    // A rotation would resume with the previous CA.
    persisted_rotation::remove(dir)?;
    persisted_rotation::write_ca(dir, material)
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use tunnel_store::testing::{Scratch, assert_contains};

    use super::*;

    #[test]
    fn exported_ca_is_the_ca_of_another_directory_after_its_import() {
        let (one, other) = (Scratch::new(), Scratch::new());
        let pem = export(&one.0).unwrap();
        let material = parse(pem.as_bytes(), "ca.pem").unwrap();
        assert_eq!(compare(&one.0, &material).unwrap(), StoredCa::Same);
        assert_eq!(compare(&other.0, &material).unwrap(), StoredCa::Missing);
        import(&other.0, &material).unwrap();
        let cas = [&one, &other].map(|scratch| LocalCa::load_or_create(&scratch.0).unwrap());
        assert_eq!(cas[0].root(), cas[1].root());
        assert_eq!(cas[0].spki_sha256(), cas[1].spki_sha256());
        let certificate = std::fs::read_to_string(other.0.ca_certificate()).unwrap();
        assert!(
            !certificate.contains("PRIVATE"),
            "the certificate is public"
        );
        assert_eq!(export(&other.0).unwrap(), pem);
        let unrelated = CaMaterial::generate(SystemTime::now()).unwrap();
        assert_eq!(compare(&one.0, &unrelated).unwrap(), StoredCa::Other);
    }

    #[test]
    fn order_and_text_between_blocks_do_not_matter_and_incomplete_files_are_explained() {
        let scratch = Scratch::new();
        let pem = export(&scratch.0).unwrap();
        let parts = CaPem::split(&pem);
        let (certificates, key) = (parts.certificates.as_str(), parts.key.as_str());
        let reversed = format!("# the key\r\n{key}text\n{certificates}").replace('\n', "\r\n");
        parse(reversed.as_bytes(), "ca.pem").unwrap();
        for (text, problem) in [
            (certificates, "ca.pem holds no usable private key"),
            (key, "ca.pem holds no usable certificate"),
            ("", "ca.pem holds no usable private key"),
        ] {
            let error = parse(text.as_bytes(), "ca.pem").unwrap_err();
            assert_contains(&error, problem);
        }
        let other = CaMaterial::generate(SystemTime::now()).unwrap();
        let mixed = format!("{}{key}", other.certificates_pem());
        let error = parse(mixed.as_bytes(), "ca.pem").unwrap_err();
        assert_contains(&error, "the key in ca.pem do not belong together");
    }
}
