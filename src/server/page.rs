//! The web page at `/`: a chat and a monitor. Its files are part of the program, and nothing from elsewhere is ever loaded.
//!
//! It is a client like any other, of `/v1/chat/completions` and `/v1/status`, and knows no more than those say.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use super::App;

/// What a browser may load and do: our own scripts and styles, requests to this server. Trusted types make sure that no text of a model
/// can become markup, whatever the scripts do.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; \
                      form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

/// Where [`INDEX`] says whether a key is demanded, so that the page need not fail once to learn it.
const NO_KEY: &str = "data-key=\"none\"";
const A_KEY: &str = "data-key=\"demanded\"";

static INDEX: &str = include_str!("page/index.html");

/// A file beside the page.
struct PageFile {
    path: &'static str,
    media_type: &'static str,
    text: &'static str,
}

const SCRIPT: &str = "text/javascript; charset=utf-8";

macro_rules! page_file {
    ($name:literal, $media_type:expr) => {
        PageFile { path: concat!("/page/", $name), media_type: $media_type, text: include_str!(concat!("page/", $name)) }
    };
}

static FILES: &[PageFile] = &[
    page_file!("style.css", "text/css; charset=utf-8"),
    page_file!("icon.svg", "image/svg+xml"),
    page_file!("app.js", SCRIPT),
    page_file!("api.js", SCRIPT),
    page_file!("chat.js", SCRIPT),
    page_file!("dom.js", SCRIPT),
    page_file!("markdown.js", SCRIPT),
    page_file!("memory.js", SCRIPT),
    page_file!("monitor.js", SCRIPT),
];

/// Whether `path` is of the page, which needs no key: it is what asks for one.
#[must_use]
pub fn is_part(path: &str) -> bool {
    path == "/" || FILES.iter().any(|file| file.path == path)
}

/// The page and its files.
pub fn routes() -> Router<Arc<App>> {
    FILES.iter().fold(Router::new().route("/", get(index)), |router, file| {
        router.route(file.path, get(move || async move { response(file.media_type, file.text) }))
    })
}

async fn index(State(app): State<Arc<App>>) -> Response {
    let key = if app.access.demands_key() { A_KEY } else { NO_KEY };
    response("text/html; charset=utf-8", INDEX.replacen(NO_KEY, key, 1))
}

fn response(media_type: &'static str, text: impl IntoResponse) -> Response {
    let headers: [(HeaderName, HeaderValue); 5] = [
        (header::CONTENT_TYPE, HeaderValue::from_static(media_type)),
        (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        // Another version of the program has another page.
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    (headers, text).into_response()
}

#[cfg(test)]
mod tests {
    use axum::body::{Body, to_bytes};
    use axum::http::Request;
    use tower::ServiceExt;

    use super::super::call::Access;
    use super::super::live::Live;
    use super::super::queue::Queue;
    use super::*;

    fn get_page(keys: &[&str], path: &str) -> (Response<()>, String) {
        let access = Access { keys: keys.iter().map(|&key| key.to_owned()).collect(), ..Access::default() };
        let app = App::new(Arc::new(Queue::new(1)), Arc::new(Live::default()), access);
        let request = Request::get(path).header("host", "localhost").body(Body::empty()).expect("a request");
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        runtime.block_on(async {
            let (parts, body) = super::super::app(Arc::new(app)).oneshot(request).await.expect("an answer").into_parts();
            let body = to_bytes(body, usize::MAX).await.expect("a body");
            (Response::from_parts(parts, ()), String::from_utf8(body.to_vec()).expect("text"))
        })
    }

    #[test]
    fn nothing_is_loaded_from_elsewhere() {
        // The name of a language, which nobody loads.
        let namespace = "xmlns=\"http://www.w3.org/2000/svg\"";
        for (name, text) in FILES.iter().map(|file| (file.path, file.text)).chain([("/", INDEX)]) {
            let text = text.replace(namespace, "");
            for address in [
                "http://",
                "https://",
                "ws://",
                "wss://",
                "src=\"//",
                "href=\"//",
                "url(",
                "@import",
                "data:text",
                "data:image",
                "data:application",
            ] {
                assert!(!text.contains(address), "{name} has {address}");
            }
        }
    }

    #[test]
    fn no_script_turns_text_into_markup() {
        for file in FILES.iter().filter(|file| file.media_type == SCRIPT) {
            for way in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"] {
                assert!(!file.text.contains(way), "{} has {way}", file.path);
            }
        }
    }

    #[test]
    fn every_part_comes_with_the_policy_and_without_a_key() {
        for keys in [&[][..], &["secret"]] {
            for path in FILES.iter().map(|file| file.path).chain(["/"]) {
                let (head, text) = get_page(keys, path);
                assert_eq!(head.status(), 200, "{path}");
                assert_eq!(head.headers()["content-security-policy"], POLICY, "{path}");
                assert_eq!(head.headers()["x-content-type-options"], "nosniff", "{path}");
                assert!(!text.is_empty() && !text.contains("secret"), "{path}");
            }
        }
        assert_eq!(get_page(&["secret"], "/page/other.js").0.status(), 401);
        assert_eq!(get_page(&[], "/page/other.js").0.status(), 404);
    }

    #[test]
    fn the_page_knows_whether_to_ask_for_a_key() {
        assert!(get_page(&["secret"], "/").1.contains(A_KEY));
        assert!(get_page(&[], "/").1.contains(NO_KEY));
    }

    /// A file that is asked for is there, and one that is there is asked for.
    #[test]
    fn the_parts_fit_together() {
        let all: String = FILES.iter().map(|file| file.text).chain([INDEX]).collect();
        for file in FILES {
            let name = file.path.trim_start_matches("/page/");
            assert!(all.contains(&format!("\"page/{name}\"")) || all.contains(&format!("'./{name}'")), "nobody asks for {name}");
        }
        for import in all.split("from './").skip(1) {
            let name = import.split('\'').next().expect("a name");
            assert!(is_part(&format!("/page/{name}")), "{name} is not served");
        }
    }
}
