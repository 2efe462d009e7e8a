//! The server's place in a build without the feature `serve`.

mod call;

pub use call::{Access, Log, ServeError, ServeOptions, ServedModel, Stop};

/// Refuses.
///
/// # Errors
/// Always [`ServeError::NotBuilt`].
pub fn serve<E: Send + 'static>(
    _options: ServeOptions,
    _open: impl FnOnce() -> Result<ServedModel, E> + Send + 'static,
) -> Result<(), ServeError<E>> {
    Err(ServeError::NotBuilt)
}
