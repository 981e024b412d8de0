#define KEYHOLE_PATH avx512_path
#define KEYHOLE_VECTOR "vector_avx512.h"
#define KEYHOLE_PROMPT_TILES "prompt_tiles.h"
#define KEYHOLE_INT8_TILES "int8_tiles_avx512.h"
#define KEYHOLE_CODES "codes_avx512.h"
#include "path.h"
