//! Who may ask: key, Host, Origin, size of the headers. Runs before every route.
//!
//! On loopback nobody needs a key, but any page that a browser shows can send requests there. Two checks keep them out: `Host` must be a
//! name that no other machine can claim (a page that points its own name at 127.0.0.1 sends that name), and `Origin`, which browsers
//! add, must be ours or listed.

use std::net::IpAddr;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use subtle::{Choice, ConstantTimeEq};

use super::App;
pub use super::call::Access;
use super::error::ApiError;
use super::page;

/// Most bytes of all headers of a request.
pub const HEADER_BYTES_MAX: usize = 32 << 10;
/// Most headers of a request.
pub const HEADERS_MAX: usize = 100;
/// Seconds for which a browser may remember what it was allowed.
const PREFLIGHT_S: &str = "600";

impl Access {
    /// Whether a key is demanded.
    #[must_use]
    pub fn demands_key(&self) -> bool {
        !self.keys.is_empty()
    }

    /// Compares with every key, each in a time that depends on lengths alone.
    fn knows(&self, given: &[u8]) -> bool {
        let found = self.keys.iter().fold(Choice::from(0), |found, key| found | key.as_bytes().ct_eq(given));
        found.into()
    }

    fn check_key(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        if !self.demands_key() {
            return Ok(());
        }
        let bearer = headers.get(header::AUTHORIZATION).and_then(|value| {
            let value = value.as_bytes();
            let (scheme, key) = value.split_at_checked(7)?;
            scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
        });
        let given = bearer.or_else(|| headers.get("x-api-key").map(HeaderValue::as_bytes));
        match given {
            Some(given) if self.knows(given) => Ok(()),
            Some(_) => {
                Err(ApiError::refused(StatusCode::UNAUTHORIZED, "invalid_api_key", "the key is not the one this server was started with"))
            }
            None => Err(ApiError::refused(
                StatusCode::UNAUTHORIZED,
                "missing_api_key",
                "a key is needed: send `Authorization: Bearer KEY` or `x-api-key: KEY`",
            )),
        }
    }

    fn check_host(&self, host: Option<&str>) -> Result<(), ApiError> {
        // A page from elsewhere has no key, whatever name it came by.
        if self.demands_key() {
            return Ok(());
        }
        let Some(host) = host else { return Err(ApiError::refused(StatusCode::BAD_REQUEST, "missing_host", "the Host header is missing")) };
        let name = host_name(host);
        let own = name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok();
        if own || self.hosts.iter().any(|listed| listed.eq_ignore_ascii_case(name)) {
            return Ok(());
        }
        let message = "the Host header names neither an address nor localhost: list the name with --allow-host";
        Err(ApiError::refused(StatusCode::FORBIDDEN, "host_not_allowed", message))
    }

    /// The origin to be allowed in the answer; `None` where none is named or it is our own page.
    fn check_origin(&self, origin: Option<&HeaderValue>, host: Option<&str>) -> Result<Option<HeaderValue>, ApiError> {
        let Some(origin) = origin else { return Ok(None) };
        let refused = || {
            let message = "pages of this Origin may not ask: list it with --cors-origin";
            ApiError::refused(StatusCode::FORBIDDEN, "origin_not_allowed", message)
        };
        let text = origin.to_str().map_err(|_| refused())?;
        // A file or a frame of unknown origin: could be anybody.
        if text == "null" {
            return Err(refused());
        }
        let authority = text.strip_prefix("http://").or_else(|| text.strip_prefix("https://"));
        if authority.is_some() && authority == host {
            return Ok(None);
        }
        if self.origins.iter().any(|listed| listed == text || listed == "*") { Ok(Some(origin.clone())) } else { Err(refused()) }
    }
}

/// A Host header without its port.
fn host_name(host: &str) -> &str {
    if let Some(rest) = host.strip_prefix('[') {
        return rest.split(']').next().unwrap_or(rest);
    }
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    }
}

/// Paths that need no key: what a load balancer asks, and the page that asks for the key.
fn is_open(path: &str, method: &Method) -> bool {
    (path == "/health" || page::is_part(path)) && matches!(*method, Method::GET | Method::HEAD)
}

fn check_size(headers: &HeaderMap) -> Result<(), ApiError> {
    let bytes: usize = headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum();
    if headers.len() > HEADERS_MAX || bytes > HEADER_BYTES_MAX {
        let count = headers.len();
        let message =
            format!("{count} headers of {bytes} bytes together: at most {HEADERS_MAX} headers and {HEADER_BYTES_MAX} bytes are taken");
        return Err(ApiError::refused(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, "headers_too_large", message));
    }
    Ok(())
}

/// Lets a request through or answers it.
pub async fn guard(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let headers = request.headers();
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).or_else(|| request.uri().host());
    let checked = check_size(headers)
        .and_then(|()| app.access.check_host(host))
        .and_then(|()| app.access.check_origin(headers.get(header::ORIGIN), host));
    let anthropic = request.uri().path().starts_with("/v1/messages");
    let answer = |error: ApiError| {
        app.live.note_refused();
        if anthropic { error.response_with(&error.anthropic_body()) } else { error.into_response() }
    };
    let origin = match checked {
        Ok(origin) => origin,
        Err(error) => return answer(error),
    };
    // A preflight carries no key.
    if request.method() == Method::OPTIONS && origin.is_some() {
        return with_cors(preflight(), origin);
    }
    if !is_open(request.uri().path(), request.method())
        && let Err(error) = app.access.check_key(headers)
    {
        return with_cors(answer(error), origin);
    }
    with_cors(next.run(request).await, origin)
}

fn preflight() -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let headers = response.headers_mut();
    let allowed = "authorization, content-type, x-api-key, anthropic-version, anthropic-beta, x-ebbtide-client";
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, OPTIONS"));
    headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, HeaderValue::from_static(allowed));
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(PREFLIGHT_S));
    response
}

fn with_cors(mut response: Response, origin: Option<HeaderValue>) -> Response {
    if let Some(origin) = origin {
        let headers = response.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.append(header::VARY, HeaderValue::from_static("Origin"));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: &'static str, value: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(name, HeaderValue::from_bytes(value.as_bytes()).expect("a header"));
        headers
    }

    #[test]
    fn only_the_very_key_is_let_in() {
        let access = Access { keys: vec!["secret-1".to_owned(), "zwei".to_owned()], ..Access::default() };
        for good in
            [headers("authorization", "Bearer secret-1"), headers("authorization", "bearer  zwei "), headers("x-api-key", "secret-1")]
        {
            assert!(access.check_key(&good).is_ok(), "{good:?}");
        }
        for bad in
            ["Bearer ", "Bearer", "secret-1", "Bearer secret", "Bearer secret-12", "Bearer sécret-1", "Basic secret-1", "Bearer Secret-1"]
        {
            let refused = access.check_key(&headers("authorization", bad)).expect_err(bad);
            assert!(refused.status == 401 && !refused.message.contains("secret"), "{bad}");
        }
        assert!(access.check_key(&HeaderMap::new()).is_err());
        assert!(Access::default().check_key(&HeaderMap::new()).is_ok());
    }

    #[test]
    fn names_that_others_can_claim_are_no_hosts() {
        let access = Access { hosts: vec!["box.lan".to_owned()], ..Access::default() };
        for good in ["localhost", "localhost:8080", "127.0.0.1:8080", "[::1]:8080", "[::1]", "192.168.0.7", "BOX.lan:1"] {
            assert!(access.check_host(Some(good)).is_ok(), "{good}");
        }
        for bad in ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example:80", "", ":8080"] {
            assert_eq!(access.check_host(Some(bad)).expect_err(bad).status, 403, "{bad}");
        }
        assert!(access.check_host(None).is_err());
    }

    #[test]
    fn pages_of_others_are_kept_out_unless_listed() {
        let access = Access { origins: vec!["https://chat.example".to_owned()], ..Access::default() };
        let check = |access: &Access, origin: &str| {
            access.check_origin(Some(&HeaderValue::from_str(origin).expect("a header")), Some("127.0.0.1:8080"))
        };
        assert_eq!(check(&access, "http://127.0.0.1:8080"), Ok(None), "our own page");
        assert_eq!(check(&access, "https://chat.example"), Ok(Some(HeaderValue::from_static("https://chat.example"))));
        for bad in ["https://evil.example", "null", "http://127.0.0.1:9090", "https://chat.example.evil", "vscode://127.0.0.1:8080"] {
            assert_eq!(check(&access, bad).expect_err(bad).status, 403, "{bad}");
        }
        let all = Access { origins: vec!["*".to_owned()], ..Access::default() };
        assert!(check(&all, "https://any.example").is_ok_and(|origin| origin.is_some()));
        assert!(check(&all, "null").is_err());
    }
}
