//! TLS from files.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, ServerConfig};

/// Why the certificate and its key cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file cannot be read or holds something else.
    #[error("cannot read the {what} in {}: {error} (it must be in PEM form)", .path.display())]
    File {
        /// What it should hold.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What went wrong.
        error: pem::Error,
    },
    /// They do not fit together.
    #[error("the certificate {} and the key {} cannot be used: {error}", .certificate.display(), .key.display())]
    Pair {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// What went wrong.
        error: rustls::Error,
    },
}

/// TLS 1.2 and 1.3 with the certificate chain and the key of two PEM files; no client certificates.
pub(super) fn acceptor(certificate: &Path, key: &Path) -> Result<TlsAcceptor, TlsError> {
    let file = |what, path: &Path| {
        let path = path.to_owned();
        move |error| TlsError::File { what, path, error }
    };
    let chain = CertificateDer::pem_file_iter(certificate)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(file("certificates", certificate))?;
    if chain.is_empty() {
        return Err(file("certificates", certificate)(pem::Error::NoItemsFound));
    }
    let secret = PrivateKeyDer::from_pem_file(key).map_err(file("private key", key))?;
    let pair =
        |error| TlsError::Pair { certificate: certificate.to_owned(), key: key.to_owned(), error };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(pair)?
        .with_no_client_auth()
        .with_single_cert(chain, secret)
        .map_err(pair)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}
