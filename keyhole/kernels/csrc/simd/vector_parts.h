// For paths without masks: parts of vectors by way of a buffer, and products of plain floats.

template <class T>
static inline Vector load(const T* p, int n) {
    T whole[Vector::width] = {};
    memcpy(whole, p, n * sizeof(T));
    return load(whole);
}
template <class T>
static inline void store(T* p, Vector a, int n) {
    T whole[Vector::width];
    store(whole, a);
    memcpy(p, whole, n * sizeof(T));
}

// Products of queries and keys. `Query` is the stored form of queries, padded with zeros to whole
// steps.
template <class T>
struct Product {
    using Query = float;
    static constexpr int step = Vector::width;
    using Key = Vector;
    static inline Key key(const T* p) { return load(p); }
    static inline Key key(const T* p, int n) { return load(p, n); }
    static inline Vector numbers(const float* q) { return load(q); }
    static inline Vector add(Vector sum, Vector q, Key k) { return fma(q, k, sum); }
    template <Part part>
    static inline Key code(const uint8_t* p) {
        return codes<part>(p);
    }
};
