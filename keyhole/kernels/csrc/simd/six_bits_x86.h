// Sixteen codes of 6 bits as bytes: four bits of `low`, and two of `high` above them.
template <int quarter>
static inline __m128i six_bit_bytes(__m128i low, __m128i high) {
    if (quarter >= 2) low = _mm_srli_epi16(low, 4);
    if (quarter < 2) high = _mm_slli_epi16(high, 4 - 2 * quarter);
    if (quarter == 3) high = _mm_srli_epi16(high, 2);
    return _mm_or_si128(_mm_and_si128(low, _mm_set1_epi8(15)),
                        _mm_and_si128(high, _mm_set1_epi8(48)));
}
